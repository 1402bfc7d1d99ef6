// Tables with search, sort, and trees.

const collator = new Intl.Collator("en", { numeric: true });

/** Compares two values; what is unknown comes last in either direction. */
function compare(a, b, sign) {
  if (!isSet(a) || !isSet(b)) return isSet(b) - isSet(a);
  return sign * (typeof a === "number" && typeof b === "number" ? a - b : collator.compare(a, b));
}

/** A column of numbers with their sum, which is unknown if one of them is. */
const summed = (label, value, number, words) => ({
  ...{ label, value, number, words },
  total: (rows) => number(rows.every((row) => isSet(value(row))) ? sum(rows, value) : null),
});

/** The parts of a path, such as `model`, `.blocks`, `[0]`. */
const pathParts = (path) =>
  path.match(/\[(?:'[^']*'|"[^"]*"|[^\]]*)\]|\.?[^.[\]]+|./gs) ?? [""];

/** A tree by the parts of the paths; a chain of single children is one node. */
function treeOf(rows, parts, start = 0, parent = "") {
  // A path may end here and begin others, and several rows may have it: each is a child.
  const groups = Map.groupBy(rows, (row) => parts.get(row)[start] ?? row);
  return [...groups.values()].map((rows) => {
    const path = parts.get(rows[0]);
    if (rows.length === 1) return { key: rows[0], row: rows[0], label: path.slice(start).join("") };
    let end = start + 1;
    while (path[end] && rows.every((row) => parts.get(row)[end] === path[end])) end++;
    const label = path.slice(start, end).join("");
    const key = `${parent}/${label}`;
    return { key, rows, label, children: treeOf(rows, parts, end, key) };
  });
}

/**
 * A table: its node, and a function that draws it again. With a `noun`, of what the rows are, it can
 * be searched and sorted.
 *
 * A column is { label, head, value, number, cell, total, words }; the first column names the row.
 * `value` returns what the column sorts by and a search finds, `number` formats it if it is a number,
 * and `cell` returns the content of a cell if that is something else; `head` is a node in place of
 * `label`, `words` an explanation; `total` returns the sum of some rows. `accept` says whether a row
 * is shown at all, `first` how many are shown without a click. With `detail`, rows form a tree by
 * their `path` and open to show what it returns.
 */
function tableOf({ name, noun, columns, rows, accept, detail, first }) {
  const [body, foot, result] = [el("tbody"), el("tfoot"), el("output", { "aria-live": "polite" })];
  const cellsOf = (row) =>
    columns.map(({ value, number, cell }) =>
      cell ? cell(row) : number ? number(value(row)) : value(row));
  const lineOf = ([name, ...cells], kind) => {
    const tds = cells.map((cell, i) => el("td", { class: columns[i + 1].number && "number" }, cell));
    return el("tr", { class: kind }, el("th", { scope: "row" }, name), tds);
  };
  const textOf = (row) => columns.map(({ value }) => value?.(row)).join(" ").toLowerCase();
  const texts = new Map(noun && rows.map((row) => [row, textOf(row)]));
  const parts = new Map(detail && rows.map((row) => [row, pathParts(row.path)]));
  const [toggled, buttons] = [new Set(), new Map()];
  let [words, sorted, sign, isFiltered] = [[], null, 1, false];
  const isMatch = (row) =>
    (!accept || accept(row)) && words.every((word) => texts.get(row).includes(word));
  const keyOf = ({ row, rows, label }) =>
    !rows ? sorted.value(row) : sorted.total ? sum(rows, sorted.value) : label;
  const order = (a, b) => (sorted ? compare(keyOf(a), keyOf(b), sign) : 0);

  /** The rows, the nodes of the tree, and the opened details. */
  function itemsOf(nodes, depth) {
    return nodes.toSorted(order).flatMap((node) => {
      const { row, key, children } = node;
      const isOpen = Boolean(children && (isFiltered || depth === 0)) !== toggled.has(key);
      const below = children ? itemsOf(children, depth + 1) : [{ opened: row }];
      return [{ ...node, depth, isOpen }, ...(isOpen ? below : [])];
    });
  }

  function withToggle({ key, row, depth, isOpen, label }) {
    const onclick = () => {
      if (!toggled.delete(key)) toggled.add(key);
      draw(true);
      buttons.get(key)?.focus();
    };
    const style = { "padding-left": `${1.125 * Math.min(depth, 12)}rem` };
    const name = el("code.path", label || row.path);
    if (row && !detail(row)) return el("div", { style }, el("span.nofold", name));
    const state = { "aria-expanded": String(isOpen), onclick, class: row && "leaf" };
    buttons.set(key, el("button.fold", state, name));
    return el("div", { style }, buttons.get(key));
  }

  function itemNode(item) {
    const { row, rows, opened } = item;
    if (opened) return el("tr", el("td.held", { colspan: columns.length }, detail(opened)));
    if (!rows) return lineOf(detail ? cellsOf(row).with(0, withToggle(item)) : cellsOf(row));
    const size = el("small.muted", many(rows.length, noun));
    const cells = columns.map(({ total }) => total?.(rows));
    return lineOf(cells.with(0, withToggle(item)).with(1, size), "group");
  }

  const lines = growing(body, itemNode, first);
  function draw(keepCount) {
    const matches = rows.filter(isMatch);
    if (isFiltered !== matches.length < rows.length) toggled.clear();
    isFiltered = matches.length < rows.length;
    const part = isFiltered ? `${integer(matches.length)} of ` : "";
    result.textContent = part + many(rows.length, noun ?? "row");
    const isTree = detail && view.value === "Tree";
    const nodes = isTree ? treeOf(matches, parts) : matches.map((row) => ({ key: row, row }));
    lines.show(itemsOf(nodes, 0), keepCount);
    const sums = columns.map(({ total }, i) => (i ? total?.(matches) : "Total"));
    if (columns.some(({ total }) => total)) foot.replaceChildren(lineOf(sums));
  }
  const box = searchBox(`Search ${plural(noun ?? "row")}`, (text) => {
    words = text.toLowerCase().split(/\s+/).filter(Boolean);
    draw();
  });
  const views = rows.length > 12 ? ["Tree", "List"] : ["List", "Tree"];
  const view = choiceOf("View", views, () => draw());

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
    const { number, words, head = column.label } = column;
    const attributes = { scope: "col", title: words, class: number && "number" };
    return el("th", attributes, noun ? el("button", { onclick: () => sortBy(column) }, head) : head);
  });

  const top = noun && el("div.controls", rows.length > 8 && box, detail && view, result);
  const table = el("table", { "aria-label": name }, el("thead", el("tr", headers)), body, foot);
  draw();
  return { node: el("div", top, table, lines.more), redraw: () => draw(true) };
}
