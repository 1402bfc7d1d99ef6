// Memory and cost by module: a table, an icicle, and the memory over the schedule.

const nameOf = (path) => (path === null ? "unknown" : path || "outside of modules");
const passOf = ({ path, backward }) => nameOf(path) + (backward ? ", backward" : "");
const heldBy = ({ at_peak }) => at_peak && sum(Object.values(at_peak), (size) => size);

/** The parts of a sum, from the whole on top to its parts below, as wide as they are large. */
function icicle(rows, value, show, depth = 1) {
  const name = ({ path }) => pathParts(path ?? "").slice(0, depth).join("");
  const groups = [...Map.groupBy(rows, name)].filter(([, some]) => sum(some, value));
  const part = ([path, some]) => {
    const title = `${nameOf(path)}: ${show(sum(some, value))}`;
    const below = some.filter((row) => pathParts(row.path ?? "").length > depth);
    const style = { "flex-grow": sum(some, value) };
    const inside = below.length > 0 && icicle(below, value, show, depth + 1);
    return el("div", { style }, el("code", { title }, pathParts(path).at(-1)), inside);
  };
  const own = rows.filter((row) => pathParts(row.path ?? "").length < depth);
  const rest = el("div", { style: { "flex-grow": sum(own, value) } });
  return el("div.icicle", groups.map(part), rest);
}

/** The bytes in use over the schedule; each piece is as wide as its module runs instructions. */
function curve(phases) {
  const most = Math.max(...phases.map(({ bytes }) => bytes), 1);
  const piece = (phase, i) => {
    const steps = (phases[i + 1]?.start ?? phase.start + 1) - phase.start;
    const style = { "flex-grow": steps, height: `${(100 * phase.bytes) / most}%` };
    const title = `${passOf(phase)}: ${byteText(phase.bytes)}`;
    return el("span", { style, title, class: phase.backward && "strong" });
  };
  const line = el("div.curve", phases.map(piece));
  const oninput = () => line.style.setProperty("width", `${100 * zoom.value}%`);
  const zoom = el("input", { type: "range", min: 1, max: 30, value: 1, "aria-label": "Zoom", oninput });
  const words = "Memory over the schedule; the backward pass is highlighted.";
  const region = el("div", { tabindex: 0, role: "region", "aria-label": words }, line);
  return [el("div.controls", note(words, " Zoom: "), zoom), region];
}

function modulesSection({ by_module }) {
  if (!by_module) return null;
  const { rows, peak, in_use, unattributed, over_time, why } = by_module;
  const title = "Memory and cost by module";
  const kinds = ({ at_peak }) =>
    Object.entries(at_peak ?? {}).map(([kind, size]) => [kind, " ", bytes(size), el("br")]);
  const columns = [
    { label: "Module", value: passOf, cell: (row) => el("code.path", passOf(row)) },
    { label: "Holds", value: ({ at_peak }) => Object.keys(at_peak ?? {}).join(" "), cell: kinds },
    summed("At the peak", heldBy, bytes, "held when the device holds most"),
    summed("Flops", (row) => row.flops, flops, "additions and multiplications"),
    summed("Bytes accessed", (row) => row.bytes_accessed, bytes, "read and written by its operations"),
    summed("Bytes sent", (row) => row.bytes_sent, bytes, "by its collectives"),
    { label: "Time", value: (row) => row.seconds, number: time, words: "at peak rates" },
  ];
  const table = tableOf({ name: title, noun: "module", columns, rows });
  const figures = { "At the peak": [heldBy, byteText], Flops: [(row) => row.flops, flopText] };
  const picture = el("div");
  const draw = (name) => picture.replaceChildren(icicle(rows, ...figures[name]));
  const choice = choiceOf("Figure", Object.keys(figures), draw);
  draw("At the peak");
  const sizes = [bytes(in_use), " in use at the peak, ", bytes(unattributed), " of it not attributed; with "];
  const words = note(sizes, "code and gaps, ", bytes(peak), " have to be free.", unknown(by_module));
  const shown = over_time.length > 0 && curve(over_time);
  return section("modules", title, words, shown, el("div.controls", choice), picture, table.node);
}
