// The arguments of the program, as a tree of their paths or as a list.

const sizes = (shape) => listOf(shape).join(" × ") || "scalar";

/** The shape of an array, with the axes over which each dimension is sharded. */
function shapeAndAxes(row, mesh) {
  if (!row.spec) return [sizes(row.shape), " ", el("span.muted", "no spec")];
  const dimension = (size, i) => [
    i ? ` × ${size}` : size,
    entryAxes(row.spec[i]).map((axis) => [" ", chip(axis, mesh?.axes?.[axis])]),
  ];
  const sums = ["unreduced", "reduced"].filter((kind) => listOf(row[kind]).length);
  return [
    row.shape.length ? row.shape.map(dimension) : "scalar",
    sums.map((kind) => el("span.muted", `, ${kind} over ${row[kind].join(" and ")}`)),
  ];
}

function slicesAt(row, mesh, position) {
  const names = Object.keys(mesh.axes);
  return row.shape.map((size, i) => {
    let [part, parts] = [0, 1];
    for (const axis of entryAxes(row.spec[i])) {
      const n = mesh.axes[axis] ?? 1;
      [part, parts] = [part * n + (position[names.indexOf(axis)] ?? 0), parts * n];
    }
    return parts === 1 ? ":" : `${(size / parts) * part}:${(size / parts) * (part + 1)}`;
  });
}

/** A line with the slice of an array that each device holds. */
function heldLine(row, mesh, columns) {
  const axes = specAxes(row.spec);
  const title = axes.length ? "What each device holds" : "Fully replicated: each device holds all";
  const cell = (position) => {
    const slices = `[${slicesAt(row, mesh, position).join(", ")}]`;
    return [deviceAt(mesh, position) ?? "·", el("br"), el("code", slices)];
  };
  const held = el("div.scroll", { tabindex: 0, role: "region", "aria-label": title });
  held.append(note(title), meshFigures(mesh, cell));
  const style = axes.length ? { "--held": axisStyle(axes[0])["--axis"] } : {};
  return el("tr", el("td.held", { colspan: columns.length, style }, held));
}

const notesOf = ({ donated, used, memory_kind }) =>
  [
    donated && "donated",
    used === false && "unused",
    memory_kind && memory_kind !== "device" && memory_kind,
  ]
    .filter(Boolean)
    .join(", ");

const parameterColumns = (mesh) => [
  { label: "Path", value: (row) => row.path },
  { label: "Dtype", value: (row) => row.dtype, cell: (row) => el("code", row.dtype) },
  {
    label: "Shape and axes",
    value: (row) => specAxes(row.spec).join(" + ") || null,
    cell: (row) => shapeAndAxes(row, mesh),
  },
  {
    label: "Shard shape",
    value: (row) => row.shard_shape?.reduce((a, b) => a * b, 1),
    cell: (row) => sizes(row.shard_shape),
  },
  {
    label: "Notes",
    value: (row) => notesOf(row) || null,
    cell: (row) => notesOf(row) && el("small.muted", notesOf(row)),
  },
  summed("Bytes/device", (row) => row.bytes_per_device, bytes),
  summed("Bytes", (row) => row.bytes_total, bytes),
];

const strips = (axes) =>
  (axes.length ? axes.map(axisStyle) : [{ "--axis": "var(--line)" }]).map((style) =>
    el("span.strip", { "aria-hidden": "true", style }),
  );

function foldButton(isOpen, onclick, attributes, ...name) {
  const state = { type: "button", "aria-expanded": String(isOpen), onclick };
  return el("button.fold", { ...state, ...attributes }, name);
}

const indented = (depth, node) =>
  el("div", { style: { "padding-left": `${1.125 * Math.min(depth, 12)}rem` } }, node);

/** The parts of a path, such as `model`, `.blocks`, `[0]`. */
const pathParts = (path) =>
  String(path).match(/\[(?:'[^']*'|"[^"]*"|[^\]]*)\]|\.?[^.[\]]+|./gs) ?? [""];

/** A tree by the parts of the paths; a chain of single children is one node. */
function treeOf(rows, parts, start = 0, parent = "") {
  // A path may end here and begin others, and several rows may have it: each is a child.
  const groups = Map.groupBy(rows, (row) => parts.get(row)[start] ?? row);
  return [...groups.values()].map((rows) => {
    const path = parts.get(rows[0]);
    if (rows.length === 1) return { row: rows[0], label: path.slice(start).join("") };
    let end = start + 1;
    while (path[end] && rows.every((row) => parts.get(row)[end] === path[end])) end++;
    const label = path.slice(start, end).join("");
    const id = `${parent}/${label}`;
    const bytes_per_device = sum(rows, (row) => row.bytes_per_device);
    const bytes_total = sum(rows, (row) => row.bytes_total);
    const children = treeOf(rows, parts, end, id);
    return { id, label, rows, children, path: label, bytes_per_device, bytes_total };
  });
}

function parametersSection({ mesh, parameters }) {
  const rows = listOf(parameters);
  if (!rows.length)
    return section("parameters", "Parameters", note("The program has no array arguments."));
  const columns = parameterColumns(mesh);
  const parts = new Map(rows.map((row) => [row, pathParts(row.path)]));
  const toggled = new Set(); // the nodes that the reader has opened or closed
  let [isTree, isFiltered] = [rows.length > 12, false];
  const isOpen = ({ id }, depth) => (isFiltered || depth === 0) !== toggled.has(id);

  function leafLine({ row, label, depth }) {
    const name = [strips(specAxes(row.spec)), el("code.path", label || row.path)];
    let held = null;
    const toggle = ({ currentTarget }) => {
      if (held) held.remove();
      held = held ? null : heldLine(row, mesh, columns);
      if (held) line.after(held);
      currentTarget.setAttribute("aria-expanded", String(held !== null));
    };
    const head =
      mesh && row.spec && listOf(row.shape).length
        ? foldButton(false, toggle, { class: "leaf", title: "What each device holds" }, name)
        : el("span.nofold", name);
    const cells = columns.slice(1).map((column) => cellOf(column, row));
    const line = lineOf(columns, [indented(depth, head), ...cells]);
    return line;
  }

  function groupLine({ id, label, rows, depth, isOpen }) {
    const toggle = () => {
      if (!toggled.delete(id)) toggled.add(id);
      table.redraw();
      table.node.querySelector(`[data-id="${CSS.escape(id)}"]`)?.focus();
    };
    const head = foldButton(isOpen, toggle, { "data-id": id }, el("code.path", label));
    const cells = columns.map(({ total }) => total?.(rows));
    cells.splice(0, 2, indented(depth, head), el("small.muted", many(rows.length, "array")));
    const line = lineOf(columns, cells);
    line.classList.add("group");
    return line;
  }

  function arrange(kept, order) {
    if (isFiltered !== kept.length < rows.length) toggled.clear();
    isFiltered = kept.length < rows.length;
    if (!isTree) return kept.toSorted(order).map((row) => ({ row, depth: 0 }));
    const visit = (nodes, depth) =>
      nodes
        .toSorted((a, b) => order(a.row ?? a, b.row ?? b))
        .flatMap((node) => {
          const shown = { ...node, depth, isOpen: node.children && isOpen(node, depth) };
          return shown.isOpen ? [shown, ...visit(node.children, depth + 1)] : [shown];
        });
    return visit(treeOf(kept, parts), 0);
  }

  const table = tableOf({
    name: "Argument arrays",
    noun: "array",
    columns,
    rows,
    search: (row) =>
      [row.path, row.dtype, listOf(row.shape).join("×"), specAxes(row.spec), notesOf(row)].join(
        " ",
      ),
    filters: switchOf("View", ["Tree", "List"], isTree ? "Tree" : "List", (view) => {
      isTree = view === "Tree";
      table.redraw();
    }),
    arrange,
    line: (item) => (item.row ? leafLine(item) : groupLine(item)),
  });
  const title = "Parameters and other arguments";
  return section("parameters", title, legend(rows, table.filter), table.node);
}

/** A bar of the bytes by mesh axes, and buttons that filter by them. */
function legend(rows, filter) {
  const keyOf = (row) => axesText(specAxes(row.spec));
  const size = (rows) => sum(rows, (row) => row.bytes_per_device);
  const groups = [...Map.groupBy(rows, keyOf)]
    .map(([key, rows]) => ({ key, rows, size: size(rows), axes: specAxes(rows[0].spec) }))
    .sort((a, b) => b.size - a.size);
  const total = Math.max(size(rows), 1);
  const chosen = new Set();
  const choose = (key, button) => {
    const isOn = !chosen.delete(key);
    if (isOn) chosen.add(key);
    button.setAttribute("aria-pressed", String(isOn));
    filter((row) => !chosen.size || chosen.has(keyOf(row)));
  };
  const button = ({ key, rows, size, axes }) =>
    el(
      "button",
      {
        type: "button",
        "aria-pressed": "false",
        onclick: ({ currentTarget }) => choose(key, currentTarget),
      },
      strips(axes),
      axes.length ? key : "fully replicated",
      el("span.muted", `  ${many(rows.length, "array")}, ${byteText(size)}`),
    );
  const label = "Show only arrays that are sharded over";
  return [
    bar(...groups.map(({ axes, size }) => [size / total, axes])),
    el("div.legend", { role: "group", "aria-label": label }, groups.map(button)),
  ];
}
