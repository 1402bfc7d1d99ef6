// The arrays of the program: arguments, and what modules return.

const sizes = (shape) => shape.join(" × ") || "scalar";

// With unreduced or reduced axes a spec is an object, else its entries, or a text.
const isNamed = (spec) => isSet(spec) && typeof spec !== "string";
const specEntries = (spec) => (isNamed(spec) ? (spec.partitions ?? spec) : []);
const entryAxes = (entry) => (isSet(entry) ? [entry].flat() : []);
const specAxes = (spec) => sortedAxes(specEntries(spec).flatMap(entryAxes));
const axesKey = (row) => axesText(specAxes(row.spec));

/** The shape of an array, with the axes over which each dimension is sharded. */
function shapeAndAxes({ spec, shape }, mesh) {
  if (!isNamed(spec)) return [sizes(shape), " ", el("span.muted", spec ?? "no spec")];
  const dimension = (size, i) => {
    const axes = entryAxes(specEntries(spec)[i]);
    return [i ? ` × ${size}` : size, axes.map((axis) => [" ", chip(axis, mesh?.axes?.[axis])])];
  };
  const sums = ["unreduced", "reduced"].filter((kind) => spec[kind]?.length);
  const words = sums.map((kind) => `, ${kind} over ${spec[kind].join(" and ")}`);
  return [shape.length ? shape.map(dimension) : "scalar", el("span.muted", words)];
}

/** The columns that arguments and activations have in common. */
const arrayColumns = (mesh) => [
  { label: "Dtype", value: (row) => row.dtype, cell: (row) => el("code", row.dtype) },
  {
    label: "Shape and axes",
    value: (row) => `${axesKey(row)} ${row.shape.join("×")}`,
    cell: (row) => shapeAndAxes(row, mesh),
  },
];

/** The slice of an array that each device holds; nothing if that is unknown. */
function heldSlices({ spec, shape }, mesh) {
  if (!mesh || !isNamed(spec) || !shape.length) return null;
  const names = Object.keys(mesh.axes);
  const sliceAt = (position) => (size, i) => {
    let [part, parts] = [0, 1];
    for (const axis of entryAxes(specEntries(spec)[i])) {
      const n = mesh.axes[axis] ?? 1;
      [part, parts] = [part * n + (position[names.indexOf(axis)] ?? 0), parts * n];
    }
    return parts === 1 ? ":" : `${(size / parts) * part}:${(size / parts) * (part + 1)}`;
  };
  const cell = (position) => {
    const slices = `[${shape.map(sliceAt(position)).join(", ")}]`;
    return [deviceAt(mesh, position), el("br"), el("code", slices)];
  };
  const isSplit = specAxes(spec).length > 0;
  const title = isSplit ? "What each device holds" : "Fully replicated: each device holds all";
  const region = { tabindex: 0, role: "region", "aria-label": title };
  return el("div.scroll", region, note(title), meshFigures(mesh, cell));
}

function notesOf({ donated, used, memory_kind }) {
  const kind = memory_kind !== "device" && memory_kind;
  return [donated && "donated", used === false && "unused", kind].filter(Boolean).join(", ");
}

/** Why an argument is sharded as it is, or a collective is there; nothing if that is unknown. */
function reasonNode(reasons, name) {
  if (!Object.hasOwn(reasons, name)) return null; // a path may be `constructor`
  const reason = reasons[name];
  const instead = reason.instead && [el("span.muted", "instead: "), el("code", reason.instead)];
  return el("ul.reason", [...reason.facts, instead].filter(Boolean).map((fact) => el("li", fact)));
}

function parametersSection({ mesh, parameters: rows, reasons }) {
  const title = "Parameters and other arguments";
  if (!rows.length) return section("parameters", title, note("The program has no array arguments."));
  const columns = [
    { label: "Path", value: (row) => row.path },
    ...arrayColumns(mesh),
    { label: "Shard shape", value: (row) => sizes(row.shard_shape) },
    { label: "Notes", value: (row) => notesOf(row) || null },
    summed("Bytes/device", (row) => row.bytes_per_device, bytes),
    summed("Bytes", (row) => row.bytes_total, bytes),
  ];
  const chosen = new Set();
  const accept = (row) => !chosen.size || chosen.has(axesKey(row));
  const detail = (row) => {
    const parts = [reasonNode(reasons, row.path), heldSlices(row, mesh)].filter(Boolean);
    return parts.length ? el("div", parts) : null;
  };
  const table = tableOf({ name: title, noun: "array", columns, rows, accept, detail });

  // A bar of the bytes by mesh axes, and buttons that show only arrays sharded over some axes.
  const size = (rows) => sum(rows, (row) => row.bytes_per_device);
  const groups = [...Map.groupBy(rows, axesKey)].sort(([, a], [, b]) => size(b) - size(a));
  const total = Math.max(size(rows), 1);
  const pieces = groups.map(([, some]) => [size(some) / total, specAxes(some[0].spec)]);
  const button = ([key, some]) => {
    const onclick = ({ currentTarget }) => {
      if (!chosen.delete(key)) chosen.add(key);
      currentTarget.setAttribute("aria-pressed", String(chosen.has(key)));
      table.redraw();
    };
    const axes = specAxes(some[0].spec);
    const name = axes.length ? axes.flatMap((axis) => [chip(axis), " + "]).slice(0, -1) : "fully replicated";
    const held = el("span.muted", ` ${many(some.length, "array")}, ${byteText(size(some))}`);
    return el("button", { "aria-pressed": "false", onclick }, name, held);
  };
  const legend = el("div.controls", { role: "group", "aria-label": "Show only" }, groups.map(button));
  return section("parameters", title, bar(...pieces), legend, table.node);
}

const CHOSEN_BY =
  "Output of each module, in call order. Its sharding is chosen by the user (activation_shardings), " +
  "by the strategy (with the sharding of an argument), by types (JAX derives it on Explicit axes), or by the " +
  "compiler: inferred from the shapes in its program where these say it.";

function activationsSection({ mesh, activations: rows }) {
  const title = "Activations";
  if (!rows.length) return section("activations", title, note("No calls of modules are known."));
  const nameOf = ({ path, method, output }) =>
    path + (method === "__call__" ? "" : `.${method}()`) + output;
  const columns = [
    { label: "Activation", value: nameOf, cell: (row) => el("code.path", nameOf(row)) },
    { label: "Module", value: (row) => row.module, cell: (row) => el("code", row.module) },
    ...arrayColumns(mesh),
    { label: "Chosen by", value: (row) => row.chosen_by },
    { label: "Bytes/device", value: (row) => row.bytes_per_device, number: bytes },
    { label: "Bytes", value: (row) => row.bytes_total, number: bytes },
  ];
  const table = tableOf({ name: title, noun: "activation", columns, rows });
  return section("activations", title, note(CHOSEN_BY), table.node);
}
