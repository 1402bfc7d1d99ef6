// What the devices exchange.

const axesOf = (collective) => sortedAxes(collective.axes);
const axesKeyOf = (collective) => axesText(axesOf(collective));

function sumsTable(collectives) {
  const column = (label, chosen, head) => {
    const cell = (kinds) => {
      const some = chosen.filter(({ kind }) => kinds.includes(kind));
      const number = el("small.muted", `${integer(some.length)} ×`);
      return some.length ? [bytes(bytesSent(some)), el("br"), number] : UNKNOWN;
    };
    return { label, head, number: true, cell: (kind) => cell([kind]), total: cell };
  };
  const columns = [{ label: "Kind", value: (kind) => kind }];
  for (const [axes, chosen] of Map.groupBy(collectives, axesKeyOf))
    columns.push(column(axes, chosen, axesNode(axesOf(chosen[0]))));
  columns.push(column("All axes", collectives));
  const rows = [...new Set(collectives.map(({ kind }) => kind))];
  return tableOf({ name: "Bytes sent by kind and axes", columns, rows }).node;
}

/** Where a collective is from; its line opens in the view by line, if the report has that. */
function origin({ source, operation }, hasLines) {
  const shown = operation?.length > 60 ? `…${operation.slice(-59)}` : operation;
  const words = operation && el("small.muted.path", { title: operation }, shown);
  const code = source && el("code", source);
  const link = hasLines ? linkButton(code, () => openLine(source), "Show the line") : code;
  return [source && [link, " "], words];
}

/** What a collective is for, with the parameters, or else the module that it is in; and why. */
function purposeOf({ name, purpose, parameters, module }, reasons) {
  const reason = reasonNode(reasons, name);
  const [first, ...rest] = parameters;
  const words = first ? first + (rest.length ? ` and ${rest.length} more` : "") : module;
  const all = { title: parameters.join("\n") };
  const why = reason && el("details", el("summary", el("small", "why?")), reason);
  return [purpose, words && [el("br"), el("small.muted.path", all, words)], why];
}

function runs({ times, in_loop, conditional }) {
  const title = conditional ? "in a branch, at most" : in_loop && "in a loop";
  if (isSet(times)) return el("span", { title }, conditional && "≤ ", integer(times));
  return el("span", { title: "in a loop of unknown length" }, "loop");
}

function collectivesSection({ collectives, hlo, by_line, reasons }) {
  const [id, name] = ["collectives", "Collectives"];
  if (!collectives) return section(id, name, note(NOT_READ));
  if (!collectives.length) return section(id, name, note("The devices exchange nothing."));
  const instruction = ({ name }) => {
    const code = el("code", name);
    return hlo ? linkButton(code, () => find(`${name} =`), "Find it in the program") : code;
  };
  const columns = [
    { label: "Kind", value: (c) => c.kind },
    { label: "Instruction", value: (c) => c.name, cell: instruction },
    { label: "Axes", value: axesKeyOf, cell: (c) => axesNode(axesOf(c)) },
    { label: "Groups", value: (c) => `${c.num_groups} of ${c.group_size}` },
    {
      label: "Purpose",
      value: (c) => [c.purpose, ...c.parameters, c.module].join(" "),
      cell: (c) => purposeOf(c, reasons),
    },
    { label: "Origin", value: (c) => [c.source, c.operation].join(" "), cell: (c) => origin(c, isSet(by_line)) },
    { label: "Runs", value: (c) => c.times ?? Infinity, number: integer, cell: runs },
    { label: "Bytes", value: (c) => c.bytes, number: bytes },
    summed("Bytes sent", bytesSentBy, bytes),
  ];
  const table = tableOf({ name, noun: "collective", columns, rows: collectives });
  const title = el("strong", `Each collective (${integer(collectives.length)})`);
  const all = el("details", { open: collectives.length <= 20 }, el("summary", title), table.node);
  const words = note("Bytes that one device sends in one call, and how many instructions send them");
  return section(id, name, words, sumsTable(collectives), all);
}
