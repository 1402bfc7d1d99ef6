// The mesh: outer axes side by side, the last two as rows and columns.

const MOST_DEVICES = 4096;

const range = (n) => [...Array(n).keys()];
const deviceAt = (mesh, position) => position.reduce((ids, i) => ids?.[i], mesh.device_ids) ?? "·";

function* positions([size, ...rest]) {
  if (size === undefined) return yield [];
  for (const i of range(size)) for (const more of positions(rest)) yield [i, ...more];
}

/** The devices of a mesh in grids; `cell` returns the content for a position in the mesh. */
function meshFigures(mesh, cell) {
  const axes = Object.entries(mesh.axes);
  const total = axes.reduce((n, [, size]) => n * size, 1);
  const outer = axes.slice(0, -2);
  const [[columnAxis, width], [rowAxis, rows] = ["", 1]] = axes.slice(-2).reverse();
  const label = (axis, i) =>
    axis && el("span.axis", { style: axisStyle(axis) }, total > 32 ? i : `${axis} ${i}`);
  const figures = [];
  let left = MOST_DEVICES;
  for (const position of positions(outer.map(([, size]) => size))) {
    if (left <= 0) break;
    const shown = Math.min(width, MOST_DEVICES);
    const height = Math.min(rows, Math.max(1, Math.floor(left / shown)));
    left -= shown * height;
    const caption = outer.map(([axis], i) => `${axis} ${position[i]}`).join(", ");
    const at = (i, j) => cell(rowAxis ? [...position, i, j] : [j]);
    const column = (j) => ({ head: label(columnAxis, j), cell: (i) => at(i, j) });
    const columns = [{ label: "", cell: (i) => label(rowAxis, i) }, ...range(shown).map(column)];
    const { node } = tableOf({ name: `Devices of the mesh ${caption}`, columns, rows: range(height), first: height });
    figures.push(el("figure.scroll", caption && el("figcaption", caption), node));
  }
  const rest = total - (MOST_DEVICES - left);
  return el("div.mesh", figures, rest > 0 && note(`… and ${integer(rest)} devices more`));
}

function meshSection({ mesh, device_kind }) {
  if (!mesh) return section("mesh", "Mesh", note("The program has no mesh."));
  const axes = Object.entries(mesh.axes).map(([axis, size]) =>
    [chip(axis), ` ${size} `, el("span.muted", mesh.axis_types[axis])]);
  const devices = meshFigures(mesh, (position) => deviceAt(mesh, position));
  const ids = `Numbers are the ids of the ${device_kind} devices.`;
  const legend = note(mesh.device_ids ? ids : "The mesh is abstract: its devices have no ids.");
  return section("mesh", "Mesh", el("div.controls", axes), devices, legend);
}
