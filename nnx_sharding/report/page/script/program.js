// The text of the program. Only offsets into it are kept, and only open parts become nodes.

const LONGEST_LINE = 4000; // characters of one line
const COLLECTIVE =
  /= .*?\s(?:all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-permute)(?:-start|-done)?\(/;

/** The lines from one offset of a text to another. */
function* linesOf(text, start, end, number) {
  while (start < end) {
    const next = text.indexOf("\n", start);
    const stop = next < 0 ? text.length : next;
    yield { number: number++, start, end: stop };
    start = stop + 1;
  }
}

/** The parts of the text: each computation, from its head to its brace, and what is between. */
function partsOf(text) {
  const parts = [];
  let part = null;
  for (const { number, start, end } of linesOf(text, 0, text.length, 1)) {
    const first = text.charAt(start);
    const isHead = text.charAt(end - 1) === "{" && !/[\s}]/.test(first);
    if (isHead ? !part?.isComputation : !part && end > start) {
      const head = text.slice(start, Math.min(end, start + 300));
      const [, entry, computation] = /^(ENTRY\s+)?(\S*)/.exec(head);
      const other = parts.length ? `From line ${number}` : "Header";
      const name = isHead ? computation : other;
      part = { name, isEntry: isHead && Boolean(entry), isComputation: isHead, start, number };
      parts.push(part);
    }
    if (part) [part.end, part.lines] = [end, number - part.number + 1];
    if (part?.isComputation && first === "}") part = null;
  }
  return parts.sort((a, b) => b.isEntry - a.isEntry);
}

function marked(text, pattern) {
  if (!pattern) return text || " ";
  // The pattern is a group, so matches are every second piece.
  return text.split(pattern).map((piece, i) => (i % 2 ? el("mark", piece) : piece));
}

function lineNode(text, { number, start, end }, pattern) {
  const match = pattern ? text.slice(start, end).search(pattern) : 0;
  const from = start + Math.max(0, match - LONGEST_LINE / 2);
  const shown = text.slice(from, Math.min(end, from + LONGEST_LINE));
  const left = end - start - shown.length;
  const hidden = el("span.muted", ` … ${integer(left)} characters of this line are hidden`);
  const attributes = { class: COLLECTIVE.test(shown) && "collective", "data-number": number };
  const content = [from > start && "…", marked(shown, pattern), left > 0 && hidden];
  return el("div.line", attributes, el("span", content));
}

function partNode(text, part, matches, pattern, isOpen) {
  const name = part.name || "(no name)";
  const count = (matches ? `${integer(matches)} found in ` : "") + many(part.lines, "line");
  const head = el("code.path", name, part.isEntry && el("strong", "  entry"));
  const code = el("div.code", { tabindex: 0, role: "region", "aria-label": `Text of ${name}` });
  const lines = growing(code, (line) => lineNode(text, line, pattern));
  const ontoggle = () => {
    if (!node.open || code.isConnected) return;
    const all = [...linesOf(text, part.start, part.end, part.number)];
    const isHit = ({ start, end }) => text.slice(start, end).search(pattern) >= 0;
    const hits = pattern ? all.filter(isHit) : all;
    const onclick = () => {
      lines.show(all);
      button.remove();
    };
    const button = el("button", { onclick }, "Show all lines");
    node.append(...(hits.length < all.length ? [button] : []), code, lines.more);
    lines.show(hits);
  };
  const summary = el("summary", head, el("small.muted", count));
  const node = el("details", { open: pattern !== null && isOpen, ontoggle }, summary);
  return node;
}

let find = () => {}; // searches the program for a text, and scrolls to it

function programSection({ hlo }) {
  if (!hlo) return section("program", "Program", note("The report has no program text."));
  const parts = partsOf(hlo);
  const [list, result] = [el("div"), el("output", { "aria-live": "polite" })];
  let [pattern, counts] = [null, new Map()];
  const nodeOf = (part) => partNode(hlo, part, counts.get(part), pattern, counts.size <= 3);
  const lines = growing(list, nodeOf);
  function search(query) {
    const escaped = query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
    pattern = query ? new RegExp(`(${escaped})`, "gi") : null;
    counts = new Map();
    for (const part of pattern ? parts : []) {
      const matches = hlo.slice(part.start, part.end).match(pattern);
      if (matches) counts.set(part, matches.length);
    }
    lines.show(pattern ? [...counts.keys()] : parts);
    const found = `${integer(sum([...counts.values()], (n) => n))} found`;
    const all = `${many(parts.length, "part")}, ${byteText(hlo.length)} of text`;
    result.textContent = pattern ? `${found} in ${many(counts.size, "part")}` : all;
  }
  search("");
  const box = searchBox("Search the program", search);
  const controls = el("div.controls", box, result);
  const node = section("program", "Program", controls, el("div", list, lines.more));
  find = (query) => {
    box.value = query;
    search(query);
    node.scrollIntoView();
    box.focus({ preventScroll: true });
  };
  return node;
}
