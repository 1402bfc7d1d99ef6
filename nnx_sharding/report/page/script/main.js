// Puts the page together.

function reportNodes(report) {
  const program = programSection(report);
  return [
    overview(report),
    el("div.pair", meshSection(report), memorySection(report)),
    el("div.pair", costSection(report), rooflineSection(report)),
    modulesSection(report),
    parametersSection(report),
    activationsSection(report),
    collectivesSection(report, (name) => program.show(`${name} =`)),
    program.node,
  ].filter(isSet);
}

function main() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const isComparison = data.format === "nnx_sharding.comparison";
  const isDiff = data.format === "nnx_sharding.diff";
  // Colours go to the axes of the mesh first, in their order.
  for (const report of isDiff ? [] : isComparison ? Object.values(data.reports) : [data])
    Object.keys(report.mesh?.axes ?? {}).forEach(numberOf);
  const links = el("ul");
  const navigate = () => {
    const ids = [...document.querySelectorAll("main section")].map(({ id }) => id);
    links.replaceChildren(...ids.map((id) => el("li", el("a", { href: `#${id}` }, id))));
  };
  const [top, content] = ["top", "main"].map((id) => document.getElementById(id));
  top.after(el("nav", { "aria-label": "Parts of the report" }, links));
  const draw = isDiff ? changesNodes : isComparison ? comparisonNodes : reportNodes;
  content.append(...draw(data, navigate));
  navigate();
}

main();
