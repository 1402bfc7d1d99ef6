// What the devices exchange.

function axesCell(axes) {
  if (axes === null) return el("span", { class: "muted" }, "no axes fit");
  return axes.length ? axes.map((axis) => chip(axis)) : el("span", { class: "muted" }, "none");
}

function sumsTable(collectives) {
  const kinds = [...new Set(collectives.map((c) => c.kind))];
  const sets = new Map(collectives.map((c) => [axisKey(axesOf(c)), axesOf(c)]));
  const cell = (some) =>
    some.length
      ? [
          bytes(sum(some, moved)),
          el("br"),
          el("span", { class: "muted small" }, `${integer(some.length)} ×`),
        ]
      : el("span", { class: "muted" }, UNKNOWN);
  const of = (kind, key) =>
    collectives.filter(
      (c) => (kind === null || c.kind === kind) && (key === null || axisKey(axesOf(c)) === key),
    );
  const line = (label, kind) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, label),
      [...sets.keys()].map((key) => el("td", { class: "number" }, cell(of(kind, key)))),
      el("td", { class: "number" }, cell(of(kind, null))),
    );
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Sums of collectives" },
    el(
      "table",
      {},
      el(
        "caption",
        {},
        "Bytes that one device sends in one call, and how many instructions send them",
      ),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("td", {}),
          [...sets.values()].map((axes) =>
            el("th", { class: "number", scope: "col" }, axesCell(axes)),
          ),
          el("th", { class: "number", scope: "col" }, "All axes"),
        ),
      ),
      el(
        "tbody",
        {},
        kinds.map((kind) => line(kind, kind)),
      ),
      el("tfoot", {}, line("All", null)),
    ),
  );
}

function collectivesSection(report, showInProgram) {
  const collectives = listOf(report.collectives);
  if (!collectives.length)
    return section(
      "collectives",
      "Collectives",
      el(
        "p",
        { class: "muted" },
        report.collectives ? "The devices exchange nothing." : "Not known.",
      ),
    );
  const times = (c) => (c.times === null || c.times === undefined ? "loop" : integer(c.times));
  const columns = [
    { label: "Kind", value: (c) => c.kind, cell: (c) => c.kind },
    {
      label: "Instruction",
      value: (c) => c.name,
      cell: (c) =>
        report.hlo
          ? el(
              "button",
              {
                class: "link mono",
                type: "button",
                title: "Find it in the program",
                onclick: () => showInProgram(c.name),
              },
              String(c.name),
            )
          : el("span", { class: "mono" }, String(c.name)),
    },
    { label: "Axes", value: (c) => axisKey(axesOf(c)), cell: (c) => axesCell(axesOf(c)) },
    {
      label: "Groups",
      value: (c) => c.group_size ?? null,
      cell: (c) => `${c.num_groups ?? UNKNOWN} of ${c.group_size ?? UNKNOWN}`,
    },
    {
      label: "Where it comes from",
      value: (c) => c.source ?? c.operation ?? null,
      cell: (c) => [
        c.source ? el("span", { class: "mono" }, c.source) : null,
        c.operation
          ? el(
              "span",
              { class: "muted small path", title: c.operation },
              (c.source ? " " : "") + shortened(c.operation),
            )
          : null,
      ],
    },
    {
      label: "Runs",
      number: true,
      value: (c) => c.times ?? Infinity,
      cell: (c) =>
        el(
          "span",
          {
            title:
              c.times === null ? "in a loop of unknown length" : c.in_loop ? "in a loop" : null,
          },
          times(c),
        ),
    },
    { label: "Size", number: true, value: (c) => c.bytes ?? null, cell: (c) => bytes(c.bytes) },
    {
      label: "Sent per device",
      number: true,
      value: moved,
      cell: (c) => bytes(moved(c)),
      total: (rows) => bytes(sum(rows, moved)),
    },
  ];
  const table = dataTable({
    name: "Collectives",
    noun: "collective",
    columns,
    rows: collectives,
    search: (c) =>
      [c.kind, c.name, c.computation, c.dtype, axisKey(axesOf(c)), c.operation, c.source].join(" "),
  });
  return section(
    "collectives",
    "Collectives",
    el(
      "div",
      { class: "stack" },
      sumsTable(collectives),
      el(
        "details",
        { open: collectives.length <= 20 },
        el("summary", {}, el("strong", {}, `Each collective (${integer(collectives.length)})`)),
        table.node,
      ),
    ),
  );
}

const shortened = (text) => (text.length > 60 ? `…${text.slice(-59)}` : text);
