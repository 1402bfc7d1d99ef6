// Strategies side by side, and one of them in full.

const linkButton = (text, onclick, title) => el("button.link", { title, onclick }, text);

function bytesSentByAxes({ collectives }) {
  const byAxes = Map.groupBy(collectives ?? [], axesKeyOf).values();
  const sums = [...byAxes].map((some) => [sum(some, bytesSent), axesOf(some[0])]);
  return sums.filter(([size]) => size).sort(([a], [b]) => b - a);
}

/** A remark on a figure of a report: whether it fits, what bounds it, or its parts by axes. */
function remark(key, report, limit) {
  const { memory, roofline } = report;
  if (key === "peak" && isNumber(limit) && isNumber(memory?.peak))
    return memory.peak <= limit ? el("small.muted", "fits") : el("small.bad", "does not fit");
  if (key === "roofline" && roofline)
    return el("small.muted", `${roofline.bound_by ?? UNKNOWN}, ${roofline.hardware}`);
  const sums = key === "bytes_sent" ? bytesSentByAxes(report) : [];
  const words = sums.map(([size, axes]) => `${axesText(axes)} ${byteText(size)}`);
  return el("small.muted", words.join(", "));
}

function strategyColumns(data, rows, show) {
  /** A column of a figure, with a remark and a bar; the best strategy is marked. */
  const rated = ([key, label, number, of]) => {
    const value = ({ report }) => (isSet(report.error) ? null : of(report));
    const most = Math.max(...rows.map(value).filter(isNumber), Number.MIN_VALUE);
    const cell = ({ name, report }) => {
      const star = data.best[key] === name && " ★ best";
      const figure = el("span", { class: star && "best" }, number(of(report)), star);
      const sizes = key === "bytes_sent" ? bytesSentByAxes(report) : [[of(report)]];
      const pieces = sizes.map(([size, axes]) => [size / most, axes]);
      return el("div.rated", figure, remark(key, report, data.memory_limit), bar(...pieces));
    };
    return { label, value, number, cell };
  };
  const link = ({ name }) => linkButton(name, () => show(name));
  const columns = [{ label: "Strategy", value: ({ name }) => name, cell: link }];
  columns.push(...FIGURES.map(rated));
  const seconds = ({ name }) => data.seconds[name];
  if (rows.some(seconds)) columns.push({ label: "Compiled in", value: seconds, number: time });
  return columns;
}

/** The table of strategies, and the report of the chosen one. */
function comparisonNodes(data, navigate) {
  const rows = Object.entries(data.reports).map(([name, report]) => ({ name, report }));
  const names = rows.filter(({ report }) => !isSet(report.error)).map(({ name }) => name);
  const choice = choiceOf("Strategy", names, names[0], show);
  const [head, detail] = [el("div.controls", el("h2", "One strategy"), choice), el("div")];
  function show(name) {
    choice.value = name;
    detail.replaceChildren(...reportNodes(data.reports[name]));
    navigate();
  }
  const columns = strategyColumns(data, rows, (name) => {
    show(name);
    head.scrollIntoView();
    choice.focus({ preventScroll: true });
  });
  const line = (row) => {
    if (!isSet(row.report.error)) return lineOf(columns, cellsOf(columns, row));
    const span = { scope: "row", colspan: columns.length };
    return el("tr", el("th", span, el("strong", row.name), el("pre.error", row.report.error)));
  };
  const [name, noun] = ["Strategies compared", "strategy"];
  const search = ({ name, report }) => [name, report.error];
  const table = tableOf({ name, noun, columns, rows, search, line });
  const limit = isNumber(data.memory_limit) && ["A device has ", bytes(data.memory_limit), "."];
  const figures = note("All figures are for one device. ", limit);
  if (names.length) show(names[0]);
  const nodes = [section("comparison", name, figures, table.node, ...ruledOutNodes(data))];
  return names.length ? [...nodes, head, detail] : nodes;
}

/** The strategies that were not compiled, folded. */
function ruledOutNodes({ ruled_out: reasons }) {
  const names = Object.keys(reasons);
  if (!names.length) return [];
  const items = names.map((name) => el("li", el("strong", name), `: ${reasons[name]}`));
  return [el("details", el("summary", `${names.length} not compiled`), el("ul", ...items))];
}
