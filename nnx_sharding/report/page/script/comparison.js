// Strategies side by side, and one of them in full.

const linkButton = (text, onclick, title) =>
  el("button.link", { type: "button", title, onclick }, text);

function bytesSentByAxes({ report }) {
  const byAxes = Map.groupBy(listOf(report.collectives), axesKeyOf);
  const sums = [...byAxes].map(([key, some]) => [key, sum(some, bytesSent), axesOf(some[0])]);
  return sums.filter(([, size]) => size).sort(([, a], [, b]) => b - a);
}

function strategyColumns(data, rows, show) {
  /** A column of a figure, with a word about it and a bar of pieces; the best is marked. */
  function rated(key, label, value, number, word, pieces = (row) => [[value(row)]]) {
    const most = Math.max(...rows.map(value).filter(isNumber), Number.MIN_VALUE);
    const cell = (row) => {
      const isBest = data.best?.[key] === row.name;
      const figure = [number(value(row)), isBest && " ★ best"];
      const parts = pieces(row).map(([size, axes]) => [size / most, axes]);
      return el(
        "div.rated",
        el("span", { class: isBest && "best" }, figure),
        word?.(row),
        bar(...parts),
      );
    };
    return { label, value, number, cell };
  }
  const peak = ({ report }) => report.memory?.peak;
  const fits = (row) => {
    if (!isNumber(data.memory_limit) || !isNumber(peak(row))) return null;
    const isFitting = peak(row) <= data.memory_limit;
    return isFitting ? el("small.muted", "fits") : el("small.bad", "does not fit");
  };
  const flops = ({ report }) => report.cost?.executed?.flops;
  const sent = ({ report }) => totalSent(report);
  const sentWords = (row) => {
    const words = bytesSentByAxes(row).map(([key, size]) => `${key} ${byteText(size)}`);
    return el("small.muted", words.join(", "));
  };
  const sentPieces = (row) => bytesSentByAxes(row).map(([, size, axes]) => [size, axes]);
  const bound = ({ report: { roofline } }) =>
    roofline && el("small.muted", `${roofline.bound_by}, ${roofline.device}`);
  const nameCell = ({ name }) => linkButton(name, () => show(name));
  const seconds = ({ name }) => data.seconds?.[name];
  const columns = [
    { label: "Strategy", value: ({ name }) => name, cell: nameCell },
    rated("peak", "Peak memory", peak, bytes, fits),
    rated("bytes_sent", "Bytes sent", sent, bytes, sentWords, sentPieces),
    rated("flops", "Flops", flops, count),
    rated("roofline", "Roofline", ({ report }) => rooflineSeconds(report), time, bound),
  ];
  if (rows.some(seconds)) columns.push({ label: "Compiled in", value: seconds, number: time });
  return columns;
}

/** The table of strategies, and the report of one of them. */
function comparisonNodes(data, navigate) {
  const reports = new Map(Object.entries(data.reports ?? {}));
  const rows = [...reports].map(([name, report]) => ({ name, report }));
  const names = rows.filter(({ report }) => !isSet(report.error)).map(({ name }) => name);
  const choice = choiceOf("Strategy", names, names[0], (name) => show(name));
  const [head, detail] = [el("div.controls", el("h2", "One strategy"), choice), el("div")];
  function show(name) {
    choice.value = name;
    detail.replaceChildren(...reportNodes(reports.get(name)));
    navigate();
  }
  const columns = strategyColumns(data, rows, (name) => {
    show(name);
    head.scrollIntoView();
    choice.focus({ preventScroll: true });
  });
  const failedLine = ({ name, report }) => {
    const span = { scope: "row", role: "rowheader", colspan: columns.length };
    return el("tr", el("th", span, el("strong", name), el("pre.error", report.error)));
  };
  const table = tableOf({
    name: "Strategies compared",
    noun: "strategy",
    columns,
    rows,
    search: ({ name, report }) => [name, report.error],
    line: (row) =>
      isSet(row.report.error) ? failedLine(row) : lineOf(columns, cellsOf(columns, row)),
  });
  const limit = isNumber(data.memory_limit) && ["A device has ", bytes(data.memory_limit), "."];
  const figures = note("All figures are for one device. ", limit);
  if (names.length) show(names[0]);
  return [
    section("comparison", "Strategies compared", figures, table.node),
    ...(names.length ? [head, detail] : []),
  ];
}
