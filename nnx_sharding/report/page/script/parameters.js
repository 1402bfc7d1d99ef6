// The arguments of the program, as a tree of their paths or as a list.

const sizes = (shape) => shape.join(" × ") || "scalar";

/** The shape of an array, with the axes over which each dimension is sharded. */
function shapeAndAxes(row, mesh) {
  const { spec } = row;
  if (!isNamed(row.spec)) return [sizes(row.shape), " ", el("span.muted", spec ?? "no spec")];
  const dimension = (size, i) => {
    const axes = entryAxes(specEntries(spec)[i]);
    return [i ? ` × ${size}` : size, axes.map((axis) => [" ", chip(axis, mesh?.axes?.[axis])])];
  };
  const sums = ["unreduced", "reduced"].filter((kind) => spec[kind]?.length);
  const words = sums.map((kind) => `, ${kind} over ${spec[kind].join(" and ")}`);
  return [row.shape.length ? row.shape.map(dimension) : "scalar", el("span.muted", words)];
}

function slicesAt(row, mesh, position) {
  const names = Object.keys(mesh.axes);
  return row.shape.map((size, i) => {
    let [part, parts] = [0, 1];
    for (const axis of entryAxes(specEntries(row.spec)[i])) {
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
  const region = { tabindex: 0, role: "region", "aria-label": title };
  const held = el("div.scroll", region, note(title), meshFigures(mesh, cell));
  const style = axes.length ? { "--held": axisStyle(axes[0])["--axis"] } : {};
  return el("tr", el("td.held", { colspan: columns.length, style }, held));
}

function notesOf({ donated, used, memory_kind }) {
  const kind = memory_kind !== "device" && memory_kind;
  return [donated && "donated", used === false && "unused", kind].filter(Boolean).join(", ");
}

const shardSize = (row) => row.shard_shape.reduce((a, b) => a * b, 1);
const axesKey = (row) => axesText(specAxes(row.spec));

const parameterColumns = (mesh) => [
  { label: "Path", value: (row) => row.path },
  { label: "Dtype", value: (row) => row.dtype, cell: (row) => el("code", row.dtype) },
  { label: "Shape and axes", value: axesKey, cell: (row) => shapeAndAxes(row, mesh) },
  { label: "Shard shape", value: shardSize, cell: (row) => sizes(row.shard_shape) },
  { label: "Notes", value: (row) => notesOf(row) || null },
  summed("Bytes/device", (row) => row.bytes_per_device, bytes),
  summed("Bytes", (row) => row.bytes_total, bytes),
];

function strips(axes) {
  const styles = axes.length ? axes.map(axisStyle) : [{ "--axis": "var(--line)" }];
  return styles.map((style) => el("span.strip", { "aria-hidden": "true", style }));
}

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
    const bytes_per_device = sum(rows, (row) => row.bytes_per_device);
    const bytes_total = sum(rows, (row) => row.bytes_total);
    const children = treeOf(rows, parts, end, key);
    return { key, label, rows, children, path: label, bytes_per_device, bytes_total };
  });
}

function parametersSection({ mesh, parameters: rows }) {
  const title = "Parameters and other arguments";
  if (!rows.length) return section("parameters", title, note("The program has no array arguments."));
  const columns = parameterColumns(mesh);
  const parts = new Map(rows.map((row) => [row, pathParts(row.path)]));
  const [toggled, buttons, chosenAxes] = [new Set(), new Map(), new Set()];
  const views = ["Tree", "List"];
  const view = choiceOf("View", views, views[Number(rows.length <= 12)], () => table.redraw());
  let isFiltered = false;

  function withToggle({ key, depth, isOpen, row }, name) {
    const toggle = () => {
      if (!toggled.delete(key)) toggled.add(key);
      table.redraw();
      buttons.get(key)?.focus();
    };
    const state = { "aria-expanded": String(isOpen), onclick: toggle };
    buttons.set(key, el("button.fold", { ...state, class: row && "leaf" }, name));
    const canOpen = !row || (mesh && isNamed(row.spec) && row.shape.length);
    const style = { "padding-left": `${1.125 * Math.min(depth, 12)}rem` };
    return el("div", { style }, canOpen ? buttons.get(key) : el("span.nofold", name));
  }

  function line(item) {
    const { heldRow, row, rows, label } = item;
    if (heldRow) return heldLine(heldRow, mesh, columns);
    if (row) {
      const name = [strips(specAxes(row.spec)), el("code.path", label || row.path)];
      return lineOf(columns, cellsOf(columns, row).with(0, withToggle(item, name)));
    }
    const cells = columns.map(({ total }) => total?.(rows));
    const size = el("small.muted", many(rows.length, "array"));
    const name = withToggle(item, el("code.path", label));
    return lineOf(columns, cells.with(0, name).with(1, size), "group");
  }

  function arrange(kept, order) {
    if (isFiltered !== kept.length < rows.length) toggled.clear();
    isFiltered = kept.length < rows.length;
    const isTree = view.value === "Tree";
    const nodes = isTree ? treeOf(kept, parts) : kept.map((row) => ({ key: row, row }));
    const visit = (nodes, depth) => {
      const sorted = nodes.toSorted((a, b) => order(a.row ?? a, b.row ?? b));
      return sorted.flatMap((node) => {
        const isOpen = (!node.row && (isFiltered || depth === 0)) !== toggled.has(node.key);
        const below = node.row ? [{ heldRow: node.row }] : visit(node.children, depth + 1);
        return [{ ...node, depth, isOpen }, ...(isOpen ? below : [])];
      });
    };
    return visit(nodes, 0);
  }

  const search = (row) => [row.path, row.dtype, row.shape.join("×"), axesKey(row), notesOf(row)];
  const accept = (row) => !chosenAxes.size || chosenAxes.has(axesKey(row));
  const names = { name: "Argument arrays", noun: "array", controls: view };
  const table = tableOf({ ...names, columns, rows, search, accept, arrange, line });
  return section("parameters", title, legend(rows, chosenAxes, table.redraw), table.node);
}

/** A bar of the bytes by mesh axes, and buttons that filter by axes. */
function legend(rows, chosen, redraw) {
  const size = (rows) => sum(rows, (row) => row.bytes_per_device);
  const groups = [...Map.groupBy(rows, axesKey)].sort(([, a], [, b]) => size(b) - size(a));
  const total = Math.max(size(rows), 1);
  const pieces = groups.map(([, rows]) => [size(rows) / total, specAxes(rows[0].spec)]);
  const button = ([key, rows]) => {
    const onclick = ({ currentTarget }) => {
      if (!chosen.delete(key)) chosen.add(key);
      currentTarget.setAttribute("aria-pressed", String(chosen.has(key)));
      redraw();
    };
    const axes = specAxes(rows[0].spec);
    const name = [strips(axes), axes.length ? key : "fully replicated"];
    const held = el("span.muted", `  ${many(rows.length, "array")}, ${byteText(size(rows))}`);
    return el("button", { "aria-pressed": "false", onclick }, name, held);
  };
  const attributes = { role: "group", "aria-label": "Show only arrays that are sharded over" };
  return [bar(...pieces), el("div.legend", attributes, groups.map(button))];
}
