// Strategies side by side, and one of them in full.

function comparisonTable(data, show) {
  const rows = Object.entries(data.reports ?? {}).map(([name, report]) => ({
    name,
    report,
    failed: report.error !== undefined,
  }));
  const peak = ({ report }) => report.memory?.peak ?? null;
  const sent = ({ report }) => totalMoved(report);
  const flops = ({ report }) => report.cost?.executed?.flops ?? null;
  const least = ({ report }) => boundTime(report);
  const limit = isNumber(data.memory_limit) ? data.memory_limit : null;

  function rated(value, text, extra = () => null, bar = null) {
    const known = rows.filter((row) => !row.failed && isNumber(value(row)));
    const high = Math.max(...known.map(value));
    const low = Math.min(...known.filter((row) => fits(row) !== false).map(value));
    return (row) => {
      const n = value(row);
      const best = isNumber(n) && n === low && low < high;
      return row.failed
        ? ""
        : el(
            "span",
            { class: "rated" },
            el("span", { class: best ? "best" : null }, text(n), best ? " ★ best" : ""),
            extra(row),
            bar && isNumber(n) && high > 0 ? bar(row, high) : null,
          );
    };
  }
  const fits = (row) => (limit === null || !isNumber(peak(row)) ? null : peak(row) <= limit);
  const fitWord = (row) =>
    fits(row) === null
      ? null
      : el(
          "span",
          { class: `small ${fits(row) ? "muted" : "bad"}` },
          fits(row) ? "fits" : "does not fit",
        );
  const plain = (value) => (row, high) =>
    el("span", { class: "bar", "aria-hidden": "true" }, width(el("span"), value(row) / high));
  function byAxes(row) {
    const sums = new Map();
    for (const c of row.report.collectives) {
      const key = axisKey(axesOf(c));
      sums.set(key, { axes: axesOf(c), bytes: (sums.get(key)?.bytes ?? 0) + moved(c) });
    }
    return [...sums].filter(([, { bytes }]) => bytes).sort(([, a], [, b]) => b.bytes - a.bytes);
  }
  const sentBar = (row, high) =>
    el(
      "span",
      { class: "bar", "aria-hidden": "true" },
      byAxes(row).map(([, { axes, bytes }]) => piece(axes, bytes / high)),
    );
  const sentWords = (row) =>
    el(
      "span",
      { class: "small muted" },
      byAxes(row)
        .map(([key, { bytes }]) => `${key === "?" ? "no axes fit" : key} ${byteText(bytes)}`)
        .join(", "),
    );

  const columns = [
    {
      label: "Strategy",
      value: (row) => row.name,
      cell: (row) => [
        row.failed
          ? el("strong", {}, row.name)
          : el(
              "button",
              { class: "link", type: "button", onclick: () => show(row.name) },
              row.name,
            ),
        row.failed ? el("p", { class: "error" }, String(row.report.error)) : null,
      ],
    },
    {
      label: "Peak memory",
      number: true,
      value: peak,
      cell: rated(peak, bytes, fitWord, plain(peak)),
    },
    {
      label: "Sent by each device",
      number: true,
      value: sent,
      cell: rated(sent, bytes, sentWords, sentBar),
    },
    { label: "Operations", number: true, value: flops, cell: rated(flops, count) },
    {
      label: "Takes at least",
      number: true,
      value: least,
      cell: rated(
        least,
        time,
        (row) =>
          el(
            "span",
            { class: "small muted" },
            row.report.roofline ? `${row.report.roofline.bound_by}, ${row.report.roofline.device}` : "",
          ),
        plain(least),
      ),
    },
  ];
  const seconds = ({ name }) => data.seconds?.[name] ?? null;
  if (rows.some(seconds))
    columns.push({
      label: "Compiled in",
      number: true,
      value: seconds,
      cell: (row) => time(seconds(row)),
    });
  const table = dataTable({
    name: "Strategies compared",
    noun: "strategy",
    columns,
    rows,
    className: "strategies",
    search: (row) => `${row.name} ${row.report.error ?? ""}`,
    line: (row) =>
      row.failed
        ? el(
            "tr",
            { role: "row" },
            el(
              "th",
              { scope: "row", role: "rowheader", colspan: columns.length },
              columns[0].cell(row),
            ),
          )
        : rowOf(columns, row),
  });
  return section(
    "comparison",
    "Strategies compared",
    el(
      "p",
      { class: "muted small lead" },
      "All figures are for one device. ",
      limit === null ? "" : ["The limit for its memory is ", bytes(limit), "."],
    ),
    table.node,
  );
}

function comparisonNodes(data, navigate) {
  const names = Object.keys(data.reports ?? {}).filter(
    (name) => data.reports[name].error === undefined,
  );
  const holder = el("div");
  const choice = el(
    "select",
    { "aria-label": "Strategy", onchange: () => show(choice.value) },
    names.map((name) => el("option", { value: name }, name)),
  );
  function show(name) {
    choice.value = name;
    holder.replaceChildren(...reportNodes(data.reports[name]));
    navigate();
  }
  const table = comparisonTable(data, (name) => {
    show(name);
    detail.scrollIntoView();
    choice.focus({ preventScroll: true });
  });
  const detail = el("div", { class: "controls detail" }, el("h2", {}, "One strategy"), choice);
  if (names.length) holder.replaceChildren(...reportNodes(data.reports[names[0]]));
  return [table, names.length ? [detail, holder] : null];
}
