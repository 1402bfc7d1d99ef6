// The mesh: outer axes side by side, the last two as rows and columns.

const MOST_DEVICES = 1024;

const range = (n) => [...Array(n).keys()];
const deviceAt = (mesh, position) => position.reduce((ids, i) => ids?.[i], mesh.device_ids);

function* positions([size, ...rest]) {
  if (size === undefined) return yield [];
  for (const i of range(size)) for (const more of positions(rest)) yield [i, ...more];
}

/** The devices of a mesh in grids; `cell` returns the content for a position in the mesh. */
function meshFigures(mesh, cell) {
  const axes = Object.entries(mesh.axes);
  const total = axes.reduce((n, [, size]) => n * size, 1);
  const [outer, inner] = [axes.slice(0, -2), axes.slice(-2)];
  const [columnAxis, columnCount] = inner.at(-1) ?? ["", 1];
  const [rowAxis, rowCount] = inner.at(-2) ?? ["", 1];
  const width = Math.min(columnCount, MOST_DEVICES);
  const isDense = total > 32;
  const label = (axis, i) => axis && (isDense ? String(i) : `${axis} ${i}`);
  const figures = [];
  let left = MOST_DEVICES;
  for (const position of positions(outer.map(([, size]) => size))) {
    if (left <= 0) break;
    const height = Math.min(rowCount, Math.max(1, Math.floor(left / width)));
    left -= width * height;
    const cellAt = (i, j) => cell([...position, ...[i, j].slice(2 - inner.length)]);
    const caption = outer.map(([axis], i) => `${axis} ${position[i]}`).join(", ");
    const rowStyle = rowAxis && axisStyle(rowAxis);
    const rowName = (i) => el("span", { style: rowStyle }, label(rowAxis, i));
    const column = (j) => ({ label: label(columnAxis, j), cell: (i) => cellAt(i, j) });
    const columns = [{ label: "", cell: rowName }, ...range(width).map(column)];
    const name = `Devices of the mesh ${caption}`;
    const { node } = tableOf({ name, columns, rows: range(height) });
    figures.push(el("figure.scroll", caption && el("figcaption", caption), node));
  }
  const rest = total - (MOST_DEVICES - left);
  const more = rest > 0 && note(`… and ${integer(rest)} devices more`);
  const style = columnAxis && axisStyle(columnAxis);
  return el("div.mesh", { class: isDense && "dense", style }, figures, more);
}

function meshSection({ mesh, device_kind }) {
  if (!mesh) return section("mesh", "Mesh", note("The program has no mesh."));
  const axes = Object.entries(mesh.axes).map(([axis, size]) =>
    el("li", chip(axis), ` ${size} `, el("span.muted", mesh.axis_types[axis])),
  );
  const devices = meshFigures(mesh, (position) => deviceAt(mesh, position) ?? "·");
  const ids = `Numbers are the ids of the ${device_kind} devices.`;
  const legend = note(mesh.device_ids ? ids : "The mesh is abstract: its devices have no ids.");
  return section("mesh", "Mesh", el("ul.axes", axes), devices, legend);
}
