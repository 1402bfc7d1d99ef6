// Puts the page together: a report, a comparison of several, or what changed.

const reportNodes = (report) =>
  [
    overview(report),
    el("div.pair", meshSection(report), memorySection(report)),
    el("div.pair", costSection(report), rooflineSection(report) ?? ""),
    modulesSection(report),
    linesSection(report),
    parametersSection(report),
    activationsSection(report),
    collectivesSection(report),
    programSection(report),
  ].filter(isSet);

/** The bytes sent over each of the axes, the most first. */
function bytesSentByAxes({ collectives }) {
  const byAxes = Map.groupBy(collectives ?? [], axesKeyOf).values();
  const sums = [...byAxes].map((some) => [bytesSent(some), axesOf(some[0])]);
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
  return el("small.muted", sums.map(([size, axes]) => `${axesText(axes)} ${byteText(size)}`).join(", "));
}

const MEASURED = "The median time of the calls that plan ran";
const COMPILED = "The time to trace and compile it on the machine that made the report";

/** The table of strategies, and the report of the chosen one. */
function comparisonNodes(data) {
  const reports = Object.entries(data.reports).map(([name, report]) => ({ name, report }));
  const [failed, rows] = [true, false].map((isFailed) =>
    reports.filter(({ report }) => isSet(report.error) === isFailed));
  const names = rows.map(({ name }) => name);
  const choice = choiceOf("Strategy", names, show);
  const [head, content] = [el("div.controls", el("h2", "One strategy"), choice), el("div")];
  function show(name) {
    choice.value = name;
    content.replaceChildren(...reportNodes(data.reports[name]));
    navigate();
  }
  const link = ({ name }) => {
    const onclick = () => {
      show(name);
      head.scrollIntoView();
      choice.focus({ preventScroll: true });
    };
    return linkButton(name, onclick);
  };
  /** A column of a figure, with a remark and a bar; the best strategy is marked. */
  const rated = ([key, label, number, of, words]) => {
    const value = ({ name, report }) => of(report, name);
    const most = Math.max(...rows.map(value).filter(isNumber), Number.MIN_VALUE);
    const cell = ({ name, report }) => {
      const star = data.best[key] === name && " ★ best";
      const amount = of(report, name);
      const shown = el("span", { class: star && "best" }, number(amount), star);
      const sizes = key === "bytes_sent" ? bytesSentByAxes(report) : [[amount]];
      const pieces = sizes.map(([size, axes]) => [size / most, axes]);
      return el("div.rated", shown, remark(key, report, data.memory_limit), bar(...pieces));
    };
    return { label, value, number, cell, words };
  };
  const seconds = ({ name }) => data.seconds[name];
  const figures = [...FIGURES];
  if (rows.some(({ name }) => data.measured[name]))
    figures.push(["measured", "Measured", time, (report, name) => data.measured[name], MEASURED]);
  const columns = [{ label: "Strategy", value: ({ name }) => name, cell: link }, ...figures.map(rated)];
  if (rows.some(seconds)) columns.push({ label: "Compiled in", value: seconds, number: time, words: COMPILED });
  const name = "Strategies compared";
  const table = tableOf({ name, noun: "strategy", columns, rows }).node;
  const errors = failed.map(({ name, report }) =>
    el("div", el("strong", name, " failed"), el("pre.error", report.error)));
  const limit = isNumber(data.memory_limit) && ["A device has ", bytes(data.memory_limit), "."];
  const words = note("All figures are for one device. ", limit);
  const caveats = [...new Set(rows.map(({ report }) => caveatOf(report)).filter(Boolean))];
  const reasons = Object.entries(data.ruled_out);
  const items = reasons.map(([name, why]) => el("li", el("strong", name), `: ${why}`));
  const others = el("details", el("summary", `${reasons.length} not compiled`), el("ul", items));
  const top = section("comparison", name, words, names.length > 0 && table, caveats.map((text) => note(text)), errors, reasons.length > 0 && others);
  if (names.length) show(names[0]);
  return names.length ? [top, head, content] : [top];
}

function changesNodes({ changes, made_with: versions }) {
  const shown = ({ kind, name }, value) => {
    if (typeof value === "string") return value;
    if (kind === "memory" || /bytes(_accessed)?$|at the peak$/.test(name)) return bytes(value);
    return (kind === "roofline" ? time : name.endsWith("flops") ? flops : count)(value);
  };
  const side = (label, key) => {
    return { label, value: (row) => row[key], cell: (row) => shown(row, row[key]) };
  };
  const growth = ({ before, after }) => {
    if (!isNumber(before) || !isNumber(after)) return null;
    return before ? (after - before) / before : Infinity;
  };
  const percent = (row) => {
    const by = growth(row);
    if (by === null) return "";
    const words = isNumber(by) ? `${by < 0 ? "" : "+"}${(100 * by).toFixed(1)}%` : "from nothing";
    return el("span", { class: by > 0 && "bad" }, words);
  };
  const columns = [
    { label: "Figure", value: ({ name }) => name },
    { label: "Part", value: ({ kind }) => kind },
    side("Before", "before"),
    side("After", "after"),
    { label: "Change", value: growth, number: String, cell: percent },
  ];
  // What reads the same before and after is in one line below the table.
  const textOf = (row, value) => el("span", shown(row, value)).textContent;
  const isSeen = (row) => textOf(row, row.before) !== textOf(row, row.after);
  const unseen = [...new Set(changes.filter((row) => !isSeen(row)).map((row) => row.name))];
  const strategy = { label: "Strategy", value: (row) => row.strategy };
  if (changes.some((row) => row.strategy)) columns.splice(1, 0, strategy);
  const name = "What changed";
  const table = tableOf({ name, noun: "change", columns, rows: changes.filter(isSeen) });
  const rest = unseen.length > 0 && note(`Changed by less than the digits shown: ${unseen.join(", ")}.`);
  const made = Object.entries(versions).map(([of, [old, now]]) => `${of} ${old} → ${now}`);
  return [section("changes", name, made.length > 0 && note(`Made with ${made.join(", ")}.`), table.node, rest)];
}

const links = el("ul");

function navigate() {
  const ids = [...document.querySelectorAll("main section")].map(({ id }) => id);
  links.replaceChildren(...ids.map((id) => el("li", el("a", { href: `#${id}` }, id))));
}

function main() {
  const data = JSON.parse(document.getElementById("data").textContent);
  // Colours go to the axes of the mesh first, in their order.
  for (const report of data.changes ? [] : Object.values(data.reports ?? [data]))
    Object.keys(report.mesh?.axes ?? {}).forEach(numberOf);
  const draw = data.changes ? changesNodes : data.reports ? comparisonNodes : reportNodes;
  document.getElementById("top").after(el("nav", { "aria-label": "Parts of the report" }, links));
  document.getElementById("main").append(...draw(data));
  navigate();
}

main();
