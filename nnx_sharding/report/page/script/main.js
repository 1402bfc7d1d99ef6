// Puts the page together.

function reportNodes(report) {
  const program = programSection(report);
  return [
    overview(report),
    el("div", { class: "pair" }, meshSection(report), memorySection(report)),
    el("div", { class: "pair" }, costSection(report), rooflineSection(report)),
    parametersSection(report),
    collectivesSection(report, (name) => program.find(`${name} =`)),
    program.node,
  ];
}

function madeWith(report) {
  const versions = Object.entries(report.made_with ?? {}).map(
    ([name, version]) => `${name} ${version}`,
  );
  const devices = `${report.num_devices ?? UNKNOWN} × ${report.device_kind ?? "device"}`;
  const platform =
    report.platform && report.platform !== report.device_kind ? ` (${report.platform})` : "";
  return [devices + platform, ...versions].join(" · ");
}

function main() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const isComparison = data.format === "nnx_sharding.comparison";
  const reports = isComparison ? Object.values(data.reports ?? {}) : [data];
  for (const report of reports) {
    const named = [
      ...Object.keys(report.mesh?.axes ?? {}),
      ...listOf(report.parameters).flatMap((p) => specAxes(p.spec)),
      ...listOf(report.collectives).flatMap((c) => axesOf(c) ?? []),
    ];
    for (const axis of named) if (!axisNumbers.has(axis)) axisNumbers.set(axis, axisNumbers.size);
  }
  const nav = el("ul");
  const navigate = () =>
    nav.replaceChildren(
      ...[...document.querySelectorAll("main section")].map((node) =>
        el("li", {}, el("a", { href: `#${node.id}` }, node.dataset.name)),
      ),
    );
  const known = reports.find((report) => report.error === undefined);
  document
    .getElementById("top")
    .append(
      el("div", {}, el("h1", {}, document.title), el("p", {}, known ? madeWith(known) : "")),
      themeSwitch(),
    );
  document.getElementById("top").after(el("nav", { "aria-label": "Parts of the report" }, nav));
  document
    .getElementById("main")
    .append(
      ...(isComparison ? comparisonNodes(data, navigate) : reportNodes(data))
        .flat(Infinity)
        .filter(Boolean),
    );
  navigate();
}

main();
