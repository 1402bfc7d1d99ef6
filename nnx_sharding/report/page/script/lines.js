// Types and cost by line of the user's code: a heat map of the source, whose lines open.

const LINE_FIGURES = {
  Flops: [(row) => row.flops, flopText],
  Bytes: [(row) => row.bytes, byteText],
  "Bytes sent": [(row) => sum(row.collectives ?? [], (c) => c.bytes), byteText],
  "At the peak": [(row) => row.at_peak, byteText],
  "Time at least": [(row) => row.seconds, (s) => nanosecondText(s * 1e9)],
  Measured: [(row) => row.measured, (s) => nanosecondText(s * 1e9)],
};

const fileName = (path) => path.split(/[\\/]/).at(-1);
const lineId = (file, line) => `line-${fileName(file)}-${line}`;

function entryText(entry) {
  if (Array.isArray(entry)) return `(${entry.map(entryText).join(", ")})`;
  if (entry === null) return "None";
  return entry === "UNCONSTRAINED" ? entry : `'${entry}'`;
}

const specOf = ({ spec }) => spec && ` P(${(spec.partitions ?? spec).map(entryText).join(", ")})`;

/** What opens below a line: its types, collectives and modules. */
function lineDetail({ types, collectives, modules }) {
  const type = (t) =>
    el("li", el("code", `${t.dtype}[${t.shape.join(",")}]`, specOf(t)),
      el("small.muted", t.backward && " backward", t.count > 1 && ` ${integer(t.count)} ×`));
  const sent = (c) =>
    el("li", `${integer(c.count)} × ${c.kind} over `, axesNode(sortedAxes(c.axes)), " ", bytes(c.bytes));
  const link = el("a", { href: "#collectives" }, "all collectives");
  return el("div.opened",
    types.length > 0 && [el("strong", "Values"), el("ul", types.map(type))],
    collectives?.length > 0 && [el("strong", "Collectives"), " ", link, el("ul", collectives.map(sent))],
    modules.length > 0 && note("in ", modules.slice(0, 8).join(", "), modules.length > 8 && ` and ${modules.length - 8} more`));
}

/** Opens a line of a file, given as `model.py:12`, if it is shown. */
function openLine(source) {
  const node = document.getElementById(`line-${source.replace(/:(\d+)$/, "-$1")}`);
  if (!node) return;
  node.open = true;
  node.scrollIntoView({ block: "center" });
  node.querySelector("summary").focus({ preventScroll: true });
}

function linesSection({ by_line }) {
  if (!by_line) return null;
  const { rows, why_types } = by_line;
  const names = Object.keys(LINE_FIGURES).filter((name) => rows.some((row) => LINE_FIGURES[name][0](row)));
  const content = el("div.heat");
  function draw(name) {
    const [value, show] = LINE_FIGURES[name] ?? LINE_FIGURES.Flops;
    const most = Math.max(...rows.map((row) => value(row) ?? 0), Number.MIN_VALUE);
    const total = sum(rows, value) || 1;
    const line = (row) => {
      const figure = value(row);
      const share = isNumber(figure) ? `${show(figure)} (${((100 * figure) / total).toFixed(1)}%)` : UNKNOWN;
      const heat = `${Math.round(45 * Math.sqrt((figure ?? 0) / most))}%`;
      const id = row.file && lineId(row.file, row.line);
      const code = row.code || (row.file ? "" : "no line of yours");
      const head = el("summary", { style: { "--heat": heat } },
        el("span.muted.number", row.line ?? ""), el("code", code), el("span.number", share));
      return el("details", { id }, head, lineDetail(row));
    };
    const files = [...Map.groupBy(rows, ({ file }) => file)];
    const part = ([file, some]) => [file && el("h3", { title: file }, fileName(file)), some.map(line)];
    content.replaceChildren(...files.flatMap(part).flat().filter(isSet));
  }
  const choice = choiceOf("Figure", names, draw);
  draw(names[0]);
  const words = note("Lines that the program runs. A line opens to the values that it makes. ", why_types);
  return section("lines", "Cost by line", words, el("div.controls", choice), content);
}
