// Strategies side by side, and one of them in full.

const linkButton = (text, onclick, title) =>
  el("button.link", { type: "button", title, onclick }, text);

/** A column of a figure, with a bar of it and a word about it; the best strategy is marked. */
function ratedColumn(rows, best, label, value, number, { word, pieces }) {
  const most = Math.max(...rows.map(value).filter(isNumber), Number.MIN_VALUE);
  const cell = (row) => {
    const isBest = row.name === best;
    return el(
      "div.rated",
      el("span", { class: isBest && "best" }, number(value(row)), isBest && " ★ best"),
      word?.(row),
      pieces && bar(...pieces(row).map(([part, axes]) => [part / most, axes])),
    );
  };
  return { label, value, number, cell };
}

function bytesSentByAxes({ report }) {
  const byAxes = Map.groupBy(listOf(report.collectives), (each) => axesText(axesOf(each)));
  return [...byAxes]
    .map(([text, some]) => ({ text, axes: axesOf(some[0]), size: sum(some, bytesSent) }))
    .filter(({ size }) => size)
    .sort((a, b) => b.size - a.size);
}

function strategyColumns(data, rows, show) {
  const limit = data.memory_limit;
  const peak = ({ report }) => report.memory?.peak;
  const roofline = ({ report }) => rooflineSeconds(report);
  const fits = (row) => {
    if (!isNumber(limit) || !isNumber(peak(row))) return null;
    return peak(row) <= limit ? el("small.muted", "fits") : el("small.bad", "does not fit");
  };
  const sent = (row) =>
    bytesSentByAxes(row)
      .map(({ text, size }) => `${text} ${byteText(size)}`)
      .join(", ");
  const bound = ({ report: { roofline } }) =>
    roofline && el("small.muted", `${roofline.bound_by}, ${roofline.device}`);
  const rated = (key, ...options) => ratedColumn(rows, data.best?.[key], ...options);
  const columns = [
    {
      label: "Strategy",
      value: ({ name }) => name,
      cell: ({ name }) => linkButton(name, () => show(name)),
    },
    rated("peak", "Peak memory", peak, bytes, { word: fits, pieces: (row) => [[peak(row)]] }),
    rated("bytes_sent", "Bytes sent", ({ report }) => totalSent(report), bytes, {
      word: (row) => el("small.muted", sent(row)),
      pieces: (row) => bytesSentByAxes(row).map(({ axes, size }) => [size, axes]),
    }),
    rated("flops", "Flops", ({ report }) => report.cost?.executed?.flops, count, {}),
    rated("roofline", "Roofline", roofline, time, {
      word: bound,
      pieces: (row) => [[roofline(row)]],
    }),
  ];
  const seconds = ({ name }) => data.seconds?.[name];
  if (rows.some(seconds)) columns.push({ label: "Compiled in", value: seconds, number: time });
  return columns;
}

/** The table of strategies, and the report of one of them. */
function comparisonNodes(data, navigate) {
  const reports = new Map(Object.entries(data.reports ?? {}));
  const rows = [...reports].map(([name, report]) => ({ name, report }));
  const names = rows.filter(({ report }) => !isSet(report.error)).map(({ name }) => name);
  const options = names.map((name) => el("option", { value: name }, name));
  const onchange = () => show(choice.value);
  const choice = el("select", { "aria-label": "Strategy", onchange }, options);
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
    search: ({ name, report }) => `${name} ${report.error ?? ""}`,
    line: (row) => (isSet(row.report.error) ? failedLine(row) : rowOf(columns, row)),
  });
  const limit = isNumber(data.memory_limit) && ["A device has ", bytes(data.memory_limit), "."];
  const figures = note("All figures are for one device. ", limit);
  if (names.length) show(names[0]);
  return [
    section("comparison", "Strategies compared", figures, table.node),
    ...(names.length ? [head, detail] : []),
  ];
}
