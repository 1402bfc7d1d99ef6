// The arguments of the program, as a tree of their paths or as a list.

function layoutOf(row, mesh) {
  const shape = listOf(row.shape);
  if (row.spec === null || row.spec === undefined)
    return el(
      "span",
      { class: "shape" },
      shape.join(" × ") || "scalar",
      " ",
      el("span", { class: "muted" }, "no spec"),
    );
  return el(
    "span",
    { class: "shape" },
    shape.length
      ? shape.map((size, i) => [
          i ? " × " : "",
          String(size),
          entryAxes(specEntries(row.spec)[i]).map((axis) => [" ", chip(axis, axisSize(mesh, axis))]),
        ])
      : "scalar",
    ["unreduced", "reduced"]
      .filter((kind) => listOf(row.spec[kind]).length)
      .map((kind) =>
        el("span", { class: "muted" }, `, ${kind} over ${row.spec[kind].join(" and ")}`),
      ),
  );
}

function slicesAt(row, mesh, at) {
  const names = Object.keys(mesh.axes);
  return listOf(row.shape).map((size, i) => {
    let [part, parts] = [0, 1];
    for (const axis of entryAxes(specEntries(row.spec)[i])) {
      const n = mesh.axes[axis] ?? 1;
      [part, parts] = [part * n + (at[names.indexOf(axis)] ?? 0), parts * n];
    }
    return parts === 1 ? ":" : `${(size / parts) * part}:${(size / parts) * (part + 1)}`;
  });
}

function whoHolds(row, mesh) {
  const axes = specAxes(row.spec);
  return [
    el(
      "p",
      { class: "muted small" },
      axes.length ? "What each device holds" : "Every device holds the whole array",
    ),
    meshFigures(
      mesh,
      (at) => {
        const slices = `[${slicesAt(row, mesh, at).join(", ")}]`;
        const device = deviceAt(mesh, at);
        return el(
          "span",
          {
            title: device === undefined || device === null ? slices : `device ${device}: ${slices}`,
          },
          deviceName(mesh, at),
          el("br"),
          el("span", { class: "mono" }, slices),
        );
      },
      (cell, at) => {
        if (axes.length) cell.classList.add("holds", ...[axisClass(axes[0])].filter(Boolean));
        cell.style.width = "auto";
        cell.style.padding = ".25rem .5rem";
        return cell;
      },
    ),
  ];
}

function parameterColumns(mesh) {
  return [
    { label: "Path", value: (row) => row.path, cell: (row) => row.path },
    {
      label: "Type",
      value: (row) => row.dtype,
      cell: (row) => el("span", { class: "mono" }, row.dtype),
    },
    {
      label: "Shape and axes",
      value: (row) => axisKey(axisSet(specAxes(row.spec))) || null,
      cell: (row) => layoutOf(row, mesh),
    },
    {
      label: "Each device holds",
      value: (row) => (row.shard_shape ? row.shard_shape.reduce((a, b) => a * b, 1) : null),
      cell: (row) =>
        el("span", { class: "shape" }, listOf(row.shard_shape).join(" × ") || "scalar"),
    },
    {
      label: "Notes",
      value: (row) => notes(row) || null,
      cell: (row) => el("span", { class: "muted small" }, notes(row)),
    },
    {
      label: "Bytes/device",
      number: true,
      value: (row) => row.bytes_per_device,
      cell: (row) => bytes(row.bytes_per_device),
      total: (rows) => bytes(sum(rows, (row) => row.bytes_per_device)),
    },
    {
      label: "Bytes in all",
      number: true,
      value: (row) => row.bytes_total,
      cell: (row) => bytes(row.bytes_total),
      total: (rows) => bytes(sum(rows, (row) => row.bytes_total)),
    },
  ];
}

const notes = (row) =>
  [
    row.donated && "donated",
    row.used === false && "unused",
    row.memory_kind && row.memory_kind !== "device" && row.memory_kind,
  ]
    .filter(Boolean)
    .join(", ");

const strip = (row) => strips(specAxes(row.spec));
const strips = (axes) =>
  (axes.length ? axes.map(axisClass) : ["none"]).map((kind) =>
    el("span", { class: `strip ${kind}`, "aria-hidden": "true" }),
  );

function parametersSection(report) {
  const { mesh } = report;
  const rows = listOf(report.parameters);
  if (!rows.length)
    return section(
      "parameters",
      "Parameters",
      el("p", { class: "muted" }, "The program takes no arrays."),
    );
  const columns = parameterColumns(mesh);
  const view = { tree: rows.length > 12, filtered: false, turned: new Set() };
  const tree = treeOf(rows);
  const isOpen = (node, depth) => (view.filtered || depth === 0) !== view.turned.has(node.id);

  function leaf({ row, label, depth }) {
    const path = [strip(row), el("span", { class: "path" }, label || row.path)];
    const canTell = mesh && row.spec && listOf(row.shape).length;
    const name = canTell
      ? el(
          "button",
          {
            class: "fold leaf",
            type: "button",
            "aria-expanded": "false",
            title: "What each device holds",
            onclick: turn,
          },
          path,
        )
      : el("span", { class: "nofold" }, path);
    const line = rowOf(columns, row, indent(depth ?? 0, name));
    let detail = null;
    function turn() {
      name.setAttribute("aria-expanded", String(detail === null));
      if (detail === null) {
        const held = el(
          "div",
          { class: "scroll", tabindex: 0, role: "region", "aria-label": "What each device holds" },
          whoHolds(row, mesh),
        );
        detail = el(
          "tr",
          { role: "row" },
          el("td", { role: "cell", colspan: columns.length, class: "held" }, held),
        );
        line.after(detail);
      } else {
        detail.remove();
        detail = null;
      }
    }
    return line;
  }

  function group({ node, depth, open }) {
    const toggle = el(
      "button",
      {
        class: "fold",
        type: "button",
        "aria-expanded": String(open),
        "data-id": node.id,
        onclick: () => {
          if (!view.turned.delete(node.id)) view.turned.add(node.id);
          table.redraw();
          document.querySelector(`[data-id="${CSS.escape(node.id)}"]`)?.focus();
        },
      },
      el("span", { class: "path" }, node.label),
    );
    return el(
      "tr",
      { role: "row", class: "group" },
      columns.map((column, i) => {
        if (i === 0) return el("th", { scope: "row", role: "rowheader" }, indent(depth, toggle));
        if (i === 1)
          return el(
            "td",
            { role: "cell", "data-label": "Holds", class: "muted small shape" },
            many(node.rows.length, "array"),
          );
        return el(
          "td",
          { role: "cell", "data-label": column.label, class: column.number ? "number" : "blank" },
          el("span", {}, column.total ? column.total(node.rows) : ""),
        );
      }),
    );
  }

  function arrange(found, order, state) {
    const filtered = found.length !== rows.length;
    if (filtered !== view.filtered) view.turned.clear();
    view.filtered = filtered;
    if (!view.tree) return [...found].sort(order).map((row) => ({ row }));
    const lines = [];
    const visit = (nodes, depth) => {
      for (const node of state.column
        ? [...nodes].sort((a, b) => order(a.stands, b.stands))
        : nodes) {
        const open = isOpen(node, depth);
        lines.push(node.row ? { row: node.row, label: node.label, depth } : { node, depth, open });
        if (node.children && open) visit(node.children, depth + 1);
      }
    };
    visit(filtered ? treeOf(found) : tree, 0);
    return lines;
  }

  const table = dataTable({
    name: "Argument arrays",
    noun: "array",
    columns,
    rows,
    arrange,
    search: (row) =>
      [
        row.path,
        row.dtype,
        listOf(row.shape).join("×"),
        specAxes(row.spec).join(" "),
        notes(row),
      ].join(" "),
    controls: [
      switchOf("View", { tree: "Tree", flat: "List" }, view.tree ? "tree" : "flat", (value) => {
        view.tree = value === "tree";
        table.redraw();
      }),
    ],
    line: (item) => (item.row ? leaf(item) : group(item)),
  });
  return section("parameters", "Parameters and other arguments", legend(rows, table), table.node);
}

function indent(depth, ...children) {
  const node = el("span", {}, children);
  node.style.display = "block";
  node.style.paddingLeft = `${Math.min(depth, 12) * 1.125}rem`;
  return node;
}

/** A tree by the parts of the paths; a chain of single children is one node. */
function treeOf(rows) {
  const root = { children: new Map() };
  for (const row of rows) {
    const parts = String(row.path).match(/\[(?:'[^']*'|"[^"]*"|[^\]]*)\]|\.?[^.[\]]+|./gs) ?? [""];
    let node = root;
    for (const part of parts.slice(0, 24)) {
      if (!node.children.has(part)) node.children.set(part, { label: part, children: new Map() });
      node = node.children.get(part);
    }
    // Two rows may have one path, and one path may begin another.
    const name = Symbol("row");
    node.children.set(name, { label: "", row, children: new Map() });
  }
  const finish = (node, id) => {
    while (node.children.size === 1) {
      const [child] = node.children.values();
      node = { ...child, label: node.label + child.label };
    }
    const { row, label } = node;
    if (row) return { label, row, rows: [row], stands: row };
    const here = `${id}/${label}`;
    const children = [...node.children.values()].map((child) => finish(child, here));
    const below = children.flatMap((child) => child.rows);
    // What sorting sees of the node.
    const stands = {
      path: label,
      bytes_per_device: sum(below, (r) => r.bytes_per_device),
      bytes_total: sum(below, (r) => r.bytes_total),
    };
    return { id: here, label, children, rows: below, stands };
  };
  return [...root.children.values()].map((child) => finish(child, ""));
}

function legend(rows, table) {
  const groups = new Map();
  for (const row of rows) {
    const axes = axisSet(specAxes(row.spec));
    const key = axisKey(axes);
    if (!groups.has(key)) groups.set(key, { key, axes, rows: [] });
    groups.get(key).rows.push(row);
  }
  const found = [...groups.values()].sort((a, b) => size(b) - size(a));
  function size(group) {
    return sum(group.rows, (row) => row.bytes_per_device);
  }
  const total = Math.max(sum(found, size), 1);
  const chosen = new Set();
  function choose(key, button) {
    const on = !chosen.delete(key);
    if (on) chosen.add(key);
    button.setAttribute("aria-pressed", String(on));
    table.filter((row) => !chosen.size || chosen.has(axisKey(axisSet(specAxes(row.spec)))));
  }
  return [
    el(
      "div",
      { class: "share", "aria-hidden": "true" },
      found.map((group) => piece(group.axes, size(group) / total)),
    ),
    el(
      "div",
      { class: "legend", role: "group", "aria-label": "Show only arrays that are cut by" },
      found.map((group) =>
        el(
          "button",
          {
            type: "button",
            class: "key",
            "aria-pressed": "false",
            onclick: (event) => choose(group.key, event.currentTarget),
          },
          strips(group.axes),
          group.key || "whole on each device",
          el(
            "span",
            { class: "muted" },
            `  ${many(group.rows.length, "array")}, ${byteText(size(group))}`,
          ),
        ),
      ),
    ),
  ];
}
