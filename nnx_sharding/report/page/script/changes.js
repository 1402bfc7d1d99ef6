// What changed between two reports or comparisons.

function changesNodes({ changes, made_with: versions }) {
  const figureOf = ({ kind, name }) =>
    kind === "roofline" ? time : kind === "memory" || name.endsWith(": bytes") ? bytes : count;
  const shown = (side) => (row) =>
    typeof row[side] === "string" ? row[side] : figureOf(row)(row[side]);
  const part = ({ before, after }) => {
    if (!isNumber(before) || !isNumber(after)) return null;
    return before ? (after - before) / before : Infinity;
  };
  const growth = (row) => {
    const by = part(row);
    if (by === null) return "";
    const percent = isNumber(by) ? `${by < 0 ? "" : "+"}${(100 * by).toFixed(1)}%` : "from nothing";
    return el("span", { class: by > 0 && "bad" }, percent);
  };
  const side = (label, key) => ({ label, value: (row) => row[key], cell: shown(key) });
  const columns = [
    { label: "Figure", value: ({ name }) => name },
    { label: "Part", value: ({ kind }) => kind },
    side("Before", "before"),
    side("After", "after"),
    { label: "Change", value: part, number: String, cell: growth },
  ];
  const strategy = { label: "Strategy", value: (row) => row.strategy };
  if (changes.some((row) => row.strategy)) columns.splice(1, 0, strategy);
  const search = (row) => [row.name, row.kind, row.strategy];
  const name = "What changed";
  const table = tableOf({ name, noun: "change", columns, rows: changes, search });
  const made = Object.entries(versions).map(([of, [old, now]]) => `${of} ${old} → ${now}`);
  const remark = made.length ? [note(`Made with ${made.join(", ")}.`)] : [];
  return [section("changes", name, ...remark, table.node)];
}
