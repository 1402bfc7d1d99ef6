// Memory, cost, and its roofline.

const MEMORY_PARTS = [
  ["arguments", "Arguments"],
  ["outputs", "Outputs"],
  ["temporaries", "Temporaries"],
  ["generated_code", "Generated code"],
  ["aliased", "Shared by arguments and outputs"],
];

function memorySection(report) {
  const { memory } = report;
  if (!memory)
    return section("memory", "Memory", el("p", { class: "muted" }, "The backend does not tell."));
  const part = (prefix) =>
    MEMORY_PARTS.map(([key, label]) => [
      label,
      memory[prefix + key],
      bytes,
      key === "aliased" ? "again" : null,
    ]);
  const hasHost = MEMORY_PARTS.some(([key]) => memory[`host_${key}`]);
  return section(
    "memory",
    "Memory of each device",
    el(
      "div",
      { class: "stack" },
      bars([...part(""), ["Peak", memory.peak, bytes, "strong"]]),
      hasHost
        ? [el("h3", {}, "On its host"), bars(part("host_"))]
        : el("p", { class: "muted small" }, "Nothing in host memory."),
    ),
  );
}

function costSection(report) {
  const stages = [
    ["lowered", "As written"],
    ["executed", "As run"],
  ];
  const cost = report.cost ?? {};
  const rows = [
    ["flops", "Floating point operations", count],
    ["bytes_accessed", "Bytes accessed", bytes],
    ["transcendentals", "Transcendental functions", count],
  ];
  return section(
    "cost",
    "Cost",
    el(
      "table",
      {},
      el("caption", { class: "hidden" }, "Cost by stage"),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("td", {}),
          stages.map(([key, title]) => el("th", { class: "number", scope: "col" }, title)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map(([key, label, show]) =>
          el(
            "tr",
            {},
            el("th", { scope: "row" }, label),
            stages.map(([stage]) => el("td", { class: "number" }, show(cost[stage]?.[key]))),
          ),
        ),
      ),
    ),
    el(
      "p",
      { class: "muted small after" },
      stages
        .filter(([key]) => cost[key]?.stage)
        .map(([key, title]) => `${title}: ${cost[key].stage}.`)
        .join(" "),
    ),
  );
}

function rooflineSection(report) {
  const { roofline } = report;
  if (!roofline) return null;
  const isUrl = /^https?:\/\//i.test(roofline.source ?? "");
  return section(
    "roofline",
    `Least time on ${roofline.device}`,
    el(
      "div",
      { class: "stack" },
      bars(
        boundTimes(roofline).map(([kind, s]) => [
          kind === roofline.bound_by ? el("strong", {}, `${kind} (the bound)`) : kind,
          s,
          time,
          kind === roofline.bound_by ? "strong" : null,
        ]),
      ),
      el(
        "p",
        { class: "muted small" },
        "Arithmetic intensity ",
        figure(roofline.arithmetic_intensity, digits, String),
        " operations per byte. ",
        !roofline.source
          ? null
          : isUrl
            ? el("a", { href: roofline.source, rel: "noopener noreferrer" }, "Figures of the device")
            : `Figures of the device: ${roofline.source}`,
      ),
    ),
  );
}
