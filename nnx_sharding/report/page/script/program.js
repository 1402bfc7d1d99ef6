// The text of the program. Only offsets into it are kept, and only what is looked at is drawn.

const LONGEST_LINE = 4000; // characters of one line
const MOST_MATCHES = 20000;

function lineEnd(text, at) {
  const end = text.indexOf("\n", at);
  return end < 0 ? text.length : end;
}

/** The parts of the text: each computation, from its head to its brace, and what is between. */
function partsOf(text) {
  const found = [];
  let open = null;
  for (let at = 0, line = 1; at < text.length; line++) {
    const end = lineEnd(text, at);
    const first = text.charAt(at);
    const opens = text.charAt(end - 1) === "{" && !/[\s}]/.test(first);
    if (opens && !open?.isComputation) {
      const [, entry, name] = /^(ENTRY\s+)?(\S*)/.exec(text.slice(at, Math.min(end, at + 300)));
      found.push((open = { name, isEntry: Boolean(entry), isComputation: true, start: at, line }));
    } else if (!open && end > at) {
      found.push((open = { name: found.length ? `From line ${line}` : "Header", start: at, line }));
    }
    if (open) [open.end, open.lines] = [end, line - open.line + 1];
    if (open?.isComputation && first === "}") open = null;
    at = end + 1;
  }
  return found.sort((a, b) => Boolean(b.isEntry) - Boolean(a.isEntry));
}

function linesOf(text, { start, end, line }) {
  const found = [];
  for (let at = start, number = line; at <= end && at < text.length; number++) {
    const stop = lineEnd(text, at);
    found.push({ number, start: at, end: stop });
    at = stop + 1;
  }
  return found;
}

const TALKS =
  /= .*?\s(?:all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)(?:-start|-done)?\(/;

function lineNode(text, { number, start, end }, pattern) {
  const found = pattern ? text.slice(start, end).search(pattern) : 0;
  const from = start + Math.max(0, found - LONGEST_LINE / 2);
  const shown = text.slice(from, Math.min(end, from + LONGEST_LINE));
  const left = end - start - shown.length;
  return el(
    "div",
    { class: `line${TALKS.test(shown) ? " talks" : ""}`, "data-number": number },
    el(
      "span",
      {},
      from > start ? "…" : "",
      marked(shown, pattern),
      left
        ? el(
            "span",
            { class: "muted" },
            ` … ${integer(left)} characters of this line are not shown`,
          )
        : null,
    ),
  );
}

function marked(text, pattern) {
  if (!pattern) return text || " ";
  const pieces = [];
  let at = 0;
  for (const match of text.matchAll(pattern)) {
    pieces.push(text.slice(at, match.index), el("mark", {}, match[0]));
    at = match.index + match[0].length;
  }
  return [...pieces, text.slice(at)];
}

function countMatches(text, parts, pattern) {
  const counts = new Map();
  const ordered = [...parts].sort((a, b) => a.start - b.start);
  let [total, i] = [0, 0];
  for (const match of text.matchAll(pattern)) {
    while (i < ordered.length && ordered[i].end <= match.index) i++;
    const part = ordered[i];
    if (!part || match.index < part.start) continue;
    counts.set(part, (counts.get(part) ?? 0) + 1);
    if (++total === MOST_MATCHES) break;
  }
  return { counts, total };
}

function partNode(text, part, matches, pattern, isOpen) {
  const node = el(
    "details",
    {},
    el(
      "summary",
      {},
      el(
        "span",
        { class: "path" },
        part.name || "(no name)",
        part.isEntry ? el("strong", {}, "  entry") : null,
      ),
      el(
        "span",
        { class: "muted small number" },
        matches
          ? `${integer(matches)} found in ${many(part.lines, "line")}`
          : many(part.lines, "line"),
      ),
    ),
  );
  const code = el("div", {
    class: "code",
    tabindex: 0,
    role: "region",
    "aria-label": `Text of ${part.name}`,
  });
  const fill = (lines) => grow(code, lines, (line) => lineNode(text, line, pattern));
  node.addEventListener("toggle", () => {
    if (!node.open || code.isConnected) return;
    const lines = linesOf(text, part);
    const hits = pattern
      ? lines.filter(({ start, end }) => text.slice(start, end).search(pattern) >= 0)
      : lines;
    if (hits.length < lines.length) {
      const whole = el(
        "button",
        {
          type: "button",
          onclick: () => {
            fill(lines);
            whole.remove();
          },
        },
        "Show all lines",
      );
      node.append(el("p", { class: "controls" }, whole));
    }
    node.append(code);
    fill(hits);
  });
  node.open = isOpen;
  return node;
}

function programSection(report) {
  const text = report.hlo;
  if (!text)
    return {
      node: section(
        "program",
        "Program",
        el("p", { class: "muted" }, "The report has no program text."),
      ),
    };
  const parts = partsOf(text);
  const list = el("div");
  const told = el("output", { "aria-live": "polite" });
  function find(query) {
    const pattern = query ? new RegExp(query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "gi") : null;
    const { counts, total } = pattern
      ? countMatches(text, parts, pattern)
      : { counts: new Map(), total: 0 };
    const shown = pattern ? parts.filter((part) => counts.has(part)) : parts;
    grow(list, shown, (part) =>
      partNode(text, part, counts.get(part), pattern, Boolean(pattern) && shown.length <= 3),
    );
    told.textContent = !pattern
      ? `${many(parts.length, "part")}, ${byteText(text.length)} of text`
      : `${integer(total)}${total === MOST_MATCHES ? " or more" : ""} found in ${many(shown.length, "part")}`;
  }
  const box = searchBox("Search the program", find);
  find("");
  const node = section("program", "Program", el("div", { class: "controls" }, box, told), list);
  return {
    node,
    find: (query) => {
      box.value = query;
      find(query);
      node.scrollIntoView();
      box.focus({ preventScroll: true });
    },
  };
}
