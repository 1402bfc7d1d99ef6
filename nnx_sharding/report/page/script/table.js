// Tables with search and sort.

const collator = new Intl.Collator("en", { numeric: true });

/** Compares two values; what is unknown comes last in either direction. */
function compare(a, b, sign) {
  if (!isSet(a) || !isSet(b)) return isSet(b) - isSet(a);
  return sign * (typeof a === "number" && typeof b === "number" ? a - b : collator.compare(a, b));
}

/** A column of numbers with their sum. */
const summed = (label, value, number) => ({
  label,
  value,
  number,
  total: (rows) => number(sum(rows, value)),
});

function lineOf(columns, [name, ...cells]) {
  return el(
    "tr",
    el("th", { scope: "row", role: "rowheader" }, name),
    cells.map((cell, i) => {
      const { label, number } = columns[i + 1];
      return el("td", { "data-label": label, class: number && "number" }, el("span", cell));
    }),
  );
}

function cellOf({ value, number, cell }, row) {
  if (cell) return cell(row);
  return number ? number(value(row)) : value(row);
}

const rowOf = (columns, row) =>
  lineOf(
    columns,
    columns.map((column) => cellOf(column, row)),
  );

/**
 * A table of rows; with a noun for them it is searched and sorted. Returns its node and functions.
 *
 * A column is { label, head, value, number, cell, total }: its name as text and, if that has more,
 * as a node; what it sorts by; the function that formats that if it is a number; what is shown if
 * that is something else; and the sum of some rows.
 * The first column names the row. `arrange` makes the lines to show of the rows that a search
 * keeps, and `line` the node of one.
 */
function tableOf({ name, noun, columns, rows, search, arrange, line, filters }) {
  const [body, foot, result] = [el("tbody"), el("tfoot"), el("output", { "aria-live": "polite" })];
  const lines = growing(body, line ?? ((row) => lineOf(columns, cellsOf(columns, row))));
  const texts = new Map(rows.map((row) => [row, noun ? search(row).toLowerCase() : ""]));
  let [words, accept, sorted, sign] = [[], () => true, null, 1];
  const order = (a, b) => (sorted ? compare(sorted.value(a), sorted.value(b), sign) : 0);

  function draw(keepCount) {
    const isFound = (row) => accept(row) && words.every((word) => texts.get(row).includes(word));
    const found = rows.filter(isFound);
    const part = found.length < rows.length ? `${integer(found.length)} of ` : "";
    result.textContent = part + many(rows.length, noun ?? "row");
    lines.show(arrange ? arrange(found, order) : found.toSorted(order), keepCount);
    if (!columns.some(({ total }) => total)) return;
    const sums = columns.map(({ total }, i) => (i ? total?.(found) : "Total"));
    foot.replaceChildren(lineOf(columns, sums));
  }

  /** First the largest or the first in the alphabet, then the reverse, then as given. */
  function sortBy(column) {
    const first = column.number ? -1 : 1;
    if (sorted !== column) [sorted, sign] = [column, first];
    else if (sign === first) sign = -first;
    else sorted = null;
    const direction = sign > 0 ? "ascending" : "descending";
    columns.forEach((each, i) =>
      headers[i].setAttribute("aria-sort", each === sorted ? direction : "none"),
    );
    draw();
  }
  const headers = columns.map((column) =>
    el(
      "th",
      { scope: "col", role: "columnheader", class: column.number && "number" },
      noun
        ? el("button", { type: "button", onclick: () => sortBy(column) }, column.label)
        : (column.head ?? column.label),
    ),
  );

  const box = searchBox(`Search ${plural(noun ?? "row")}`, (text) => {
    words = text.toLowerCase().split(/\s+/).filter(Boolean);
    draw();
  });
  const table = el("table", { "aria-label": name }, el("thead", el("tr", headers)), body, foot);
  const node = el(
    "div",
    noun && el("div.controls", rows.length > 8 && box, filters, result),
    table,
    lines.more,
  );
  draw();
  return {
    node,
    redraw: () => draw(true),
    filter: (isKept) => {
      accept = isKept;
      draw();
    },
  };
}
