// Tables with search and sort.

const collator = new Intl.Collator("en", { numeric: true });

/** What is not known comes last in either direction. */
function compareValues(a, b, sign) {
  const [noA, noB] = [a === null || a === undefined, b === null || b === undefined];
  if (noA || noB) return noA - noB;
  const areNumbers = typeof a === "number" && typeof b === "number";
  return sign * (areNumbers ? a - b : collator.compare(a, b));
}

/**
 * A table with search and sort. A column is {label, value, cell, number, total}; the first is the
 * name of the row. `arrange` makes the lines to show of the rows found, and `line` the node of one.
 */
function dataTable({ name, columns, rows, search, noun, controls = [], arrange, line, className }) {
  const state = { words: [], column: null, descending: false, accept: () => true };
  const body = el("tbody", { role: "rowgroup" });
  const totals = el("tfoot", { role: "rowgroup" });
  const told = el("output", { "aria-live": "polite" });
  const texts = new Map(rows.map((row) => [row, search(row).toLowerCase()]));
  let shown = () => 0;

  const headers = columns.map((column) =>
    el(
      "th",
      { scope: "col", role: "columnheader", class: column.number ? "number" : null },
      el("button", { type: "button", onclick: () => sortBy(column) }, column.label),
    ),
  );
  const select = el(
    "select",
    { onchange: () => sortBy(columns[select.value] ?? null) },
    el("option", { value: "" }, "as given"),
    columns.map((column, i) => el("option", { value: i }, column.label)),
  );

  function sortBy(column) {
    const again = column !== null && state.column === column;
    state.descending = again ? !state.descending : Boolean(column?.number);
    state.column = column;
    select.value = column === null ? "" : columns.indexOf(column);
    headers.forEach((header, i) => {
      if (columns[i] === column)
        header.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
      else header.removeAttribute("aria-sort");
    });
    draw();
  }

  const order = (a, b) =>
    state.column === null
      ? 0
      : compareValues(state.column.value(a), state.column.value(b), state.descending ? -1 : 1);

  function draw(atLeast = 0) {
    const found = rows.filter(
      (row) => state.accept(row) && state.words.every((word) => texts.get(row).includes(word)),
    );
    const lines = arrange ? arrange(found, order, state) : [...found].sort(order);
    shown = grow(body, lines, line ?? ((row) => rowOf(columns, row)), {
      atLeast,
      wrap: (button) =>
        el("tr", { role: "row" }, el("td", { role: "cell", colspan: columns.length }, button)),
    });
    told.textContent =
      found.length === rows.length
        ? many(rows.length, noun)
        : `${integer(found.length)} of ${many(rows.length, noun)}`;
    if (columns.some((column) => column.total))
      totals.replaceChildren(
        el(
          "tr",
          { role: "row" },
          columns.map((column, i) =>
            i
              ? el(
                  "td",
                  {
                    role: "cell",
                    "data-label": column.label,
                    class: column.total ? "number" : "blank",
                  },
                  el("span", {}, column.total ? column.total(found) : ""),
                )
              : el("th", { scope: "row", role: "rowheader" }, "Total"),
          ),
        ),
      );
  }

  const node = el(
    "div",
    { class: className },
    el(
      "div",
      { class: `controls${rows.length > 8 ? "" : " few"}` },
      searchBox(`Search ${plural(noun)}`, (text) => {
        state.words = text.toLowerCase().split(/\s+/).filter(Boolean);
        draw();
      }),
      controls,
      el("label", { class: "phone" }, "Sort by", select),
      told,
    ),
    el(
      "table",
      { class: "cards", role: "table" },
      el("caption", { class: "hidden" }, name),
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, headers)),
      body,
      totals,
    ),
  );
  draw();
  return {
    node,
    redraw: () => draw(shown()),
    filter: (accept) => {
      state.accept = accept;
      draw();
    },
  };
}

function rowOf(columns, row, first = null, attributes = {}) {
  return el(
    "tr",
    { role: "row", ...attributes },
    columns.map((column, i) =>
      i
        ? el(
            "td",
            {
              role: "cell",
              "data-label": column.label,
              class: column.number ? "number" : column.value(row) === null ? "blank" : null,
            },
            el("span", {}, column.cell(row)),
          )
        : el("th", { scope: "row", role: "rowheader" }, first ?? column.cell(row)),
    ),
  );
}
