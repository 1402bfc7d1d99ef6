// The mesh: outer axes side by side, the last two as rows and columns.

const MOST_DEVICES = 1024;

function meshFigures(mesh, label, paintCell) {
  const axes = Object.entries(mesh.axes ?? {});
  const total = axes.reduce((n, [, size]) => n * size, 1);
  const [rows, columns] = [axes.at(-2), axes.at(-1)];
  const outer = axes.slice(0, -2);
  const dense = total > 32;
  const figures = [];
  let drawn = 0;
  for (const position of positions(outer.map(([, size]) => size))) {
    if (drawn >= MOST_DEVICES) break;
    const caption = outer.map(([axis], i) => `${axis} ${position[i]}`).join(", ");
    const range = (n) => [...Array(n).keys()];
    const width = Math.min(columns?.[1] ?? 1, MOST_DEVICES);
    const height = Math.min(
      rows?.[1] ?? 1,
      Math.max(1, Math.floor((MOST_DEVICES - drawn) / width)),
    );
    drawn += width * height;
    figures.push(
      el(
        "figure",
        { class: "scroll" },
        outer.length ? el("figcaption", {}, caption) : null,
        el(
          "table",
          {},
          el("caption", { class: "hidden" }, `Devices of the mesh ${caption}`),
          el(
            "thead",
            {},
            el(
              "tr",
              {},
              rows ? el("td", { hidden: true }) : null,
              rows ? el("th", { "aria-hidden": "true" }) : null,
              range(width).map((j) =>
                el(
                  "th",
                  { scope: "col", class: columns ? axisClass(columns[0]) : "" },
                  columns ? (dense ? j : `${columns[0]} ${j}`) : "",
                ),
              ),
            ),
          ),
          el(
            "tbody",
            {},
            range(height).map((i) =>
              el(
                "tr",
                {},
                rows
                  ? el(
                      "th",
                      { scope: "row", class: axisClass(rows[0]) },
                      dense ? i : `${rows[0]} ${i}`,
                    )
                  : null,
                range(width).map((j) => {
                  const at = [...position, ...(rows ? [i] : []), ...(columns ? [j] : [])];
                  const cell = el("td", {}, label(at));
                  return paintCell ? paintCell(cell, at) : cell;
                }),
              ),
            ),
          ),
        ),
      ),
    );
  }
  const rest = total - drawn;
  return el(
    "div",
    { class: `mesh${dense ? " dense" : ""}` },
    figures,
    rest > 0 ? el("p", { class: "muted small" }, `… and ${integer(rest)} devices more`) : null,
  );
}

function* positions(sizes) {
  if (!sizes.length) return yield [];
  const [size, ...rest] = sizes;
  for (let i = 0; i < size; i++) for (const more of positions(rest)) yield [i, ...more];
}

const deviceAt = (mesh, at) => at.reduce((ids, i) => ids?.[i], mesh.device_ids);
const deviceName = (mesh, at) => String(deviceAt(mesh, at) ?? "·");

function meshSection(report) {
  const { mesh } = report;
  const axes = Object.entries(mesh?.axes ?? {});
  if (!mesh)
    return section("mesh", "Mesh", el("p", { class: "muted" }, "The program has no mesh."));
  return section(
    "mesh",
    "Mesh",
    el(
      "div",
      { class: "stack" },
      el(
        "ul",
        { class: "axes" },
        axes.map(([axis, size]) =>
          el(
            "li",
            {},
            chip(axis),
            ` ${size} `,
            el("span", { class: "muted" }, mesh.axis_types?.[axis] ?? ""),
          ),
        ),
      ),
      meshFigures(mesh, (at) => deviceName(mesh, at)),
      el(
        "p",
        { class: "muted small" },
        mesh.device_ids
          ? `Numbers are the ids of the ${report.device_kind ?? ""} devices.`
          : "An abstract mesh: its devices have no ids.",
      ),
    ),
  );
}
