// Tables with search and sort.

const collator = new Intl.Collator("en", { numeric: true });

/** Compares two values; what is unknown comes last in either direction. */
function compare(a, b, sign) {
  if (!isSet(a) || !isSet(b)) return isSet(b) - isSet(a);
  return sign * (typeof a === "number" && typeof b === "number" ? a - b : collator.compare(a, b));
}

/** A column of numbers with their sum. */
function summed(label, value, number) {
  return { label, value, number, total: (rows) => number(sum(rows, value)) };
}

const shownText = (value) => value;
const cellsOf = (columns, row) =>
  columns.map(({ value, number = shownText, cell = (row) => number(value(row)) }) => cell(row));

function lineOf(columns, [name, ...cells], kind) {
  const tds = cells.map((cell, i) => el("td", { class: columns[i + 1].number && "number" }, cell));
  return el("tr", { class: kind }, el("th", { scope: "row" }, name), tds);
}

/**
 * A table: its node, and a function that draws it again. With `search` it can be searched and sorted.
 *
 * A column is { label, head, value, number, cell, total }; the first column names the row. `value`
 * returns what the column sorts by, `number` formats it if it is a number, and `cell` returns the
 * content of a cell if that is something else; `head` is a node in place of `label`; `total` returns
 * the sum of some rows. `search` returns the texts of a row that a search looks at, `accept` whether
 * a row is shown at all. `arrange` turns rows into the items to show, `line` an item into its node.
 */
function tableOf({ name, noun = "row", columns, rows, search, accept, arrange, line, controls }) {
  const [body, foot, result] = [el("tbody"), el("tfoot"), el("output", { "aria-live": "polite" })];
  const lines = growing(body, line ?? ((row) => lineOf(columns, cellsOf(columns, row))));
  const texts = new Map(rows.map((row) => [row, search?.(row).join(" ").toLowerCase()]));
  let [words, sorted, sign] = [[], null, 1];
  const order = (a, b) => (sorted ? compare(sorted.value(a), sorted.value(b), sign) : 0);
  const isMatch = (row) =>
    (!accept || accept(row)) && words.every((word) => texts.get(row).includes(word));

  function draw(keepCount) {
    const matches = rows.filter(isMatch);
    const part = matches.length < rows.length ? `${integer(matches.length)} of ` : "";
    result.textContent = part + many(rows.length, noun);
    lines.show(arrange ? arrange(matches, order) : matches.toSorted(order), keepCount);
    const sums = columns.map(({ total }, i) => (i ? total?.(matches) : "Total"));
    if (columns.some(({ total }) => total)) foot.replaceChildren(lineOf(columns, sums));
  }
  const box = searchBox(`Search ${plural(noun)}`, (text) => {
    words = text.toLowerCase().split(/\s+/).filter(Boolean);
    draw();
  });

  /** First the largest number or the first name, then the reverse, then the order of the report. */
  function sortBy(column) {
    const first = column.number ? -1 : 1;
    if (sorted !== column) [sorted, sign] = [column, first];
    else if (sign === first) sign = -first;
    else sorted = null;
    const direction = sign > 0 ? "ascending" : "descending";
    for (const [i, header] of headers.entries())
      header.setAttribute("aria-sort", columns[i] === sorted ? direction : "none");
    draw();
  }
  const headers = columns.map((column) => {
    const attributes = { scope: "col", class: column.number && "number" };
    if (!search) return el("th", attributes, column.head ?? column.label);
    const sort = { onclick: () => sortBy(column) };
    return el("th", attributes, el("button", sort, column.label));
  });

  const top = search && el("div.controls", rows.length > 8 && box, controls, result);
  const table = el("table", { "aria-label": name }, el("thead", el("tr", headers)), body, foot);
  draw();
  return { node: el("div", top, table, lines.more), redraw: () => draw(true) };
}
