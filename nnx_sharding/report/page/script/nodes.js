// Nodes, numbers and colours. Text from a report only ever becomes the text of a node.

const CHUNK = 200; // rows or lines that are shown at first
const UNKNOWN = "–";

const isSet = (value) => value !== null && value !== undefined && value !== false;
const isNumber = Number.isFinite;
const isObject = (value) => value?.constructor === Object;

/** An element, as `el("p.muted", { title: "…" }, "text", node)`; attributes may be left out. */
function el(tag, ...children) {
  const [name, ...classes] = tag.split(".");
  const attributes = isObject(children[0]) ? children.shift() : {};
  const node = document.createElement(name);
  node.classList.add(...classes);
  for (const [key, value] of Object.entries(attributes)) {
    if (!isSet(value)) continue;
    if (key === "class") node.classList.add(value);
    else if (key === "style")
      Object.entries(value).forEach((rule) => node.style.setProperty(...rule));
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter(isSet));
  return node;
}

const note = (...text) => el("p.muted", el("small", text));

function section(id, title, ...content) {
  const heading = el("h2", { id: `${id}-title` }, title);
  return el("section", { id, "aria-labelledby": heading.id }, heading, content);
}

const linkButton = (text, onclick, title) => el("button.link", { title, onclick }, text);

/** Shows the first items in a container; `more` is a button that doubles their number. */
function growing(container, make, first = CHUNK) {
  let [items, count] = [[], 0];
  const more = el("button.more", { onclick: () => add(count) });
  function add(some) {
    container.append(...items.slice(count, count + some).map(make));
    count = Math.min(items.length, count + some);
    more.hidden = count === items.length;
    more.textContent = `Show more (${integer(items.length - count)} left)`;
  }
  function show(all, keepCount = false) {
    const some = keepCount ? Math.max(first, count) : first;
    [items, count] = [all, 0];
    container.replaceChildren();
    add(some);
  }
  return { more, show };
}

function searchBox(label, onchange) {
  let timer = 0;
  const oninput = () => {
    clearTimeout(timer);
    timer = setTimeout(() => onchange(box.value), 120);
  };
  const names = { placeholder: label, "aria-label": label };
  const box = el("input", { type: "search", ...names, autocomplete: "off", oninput });
  return box;
}

function choiceOf(label, names, onchoice) {
  const onchange = () => onchoice(choice.value);
  const choice = el("select", { "aria-label": label, onchange }, names.map((name) => el("option", name)));
  return choice;
}

// Numbers as people read them, with the exact one in the title.

const integer = (n) => Math.round(n).toLocaleString("en-US");
const plural = (noun) => (/[^aeiou]y$/.test(noun) ? `${noun.slice(0, -1)}ies` : `${noun}s`);
const many = (n, noun) => `${integer(n)} ${n === 1 ? noun : plural(noun)}`;
const sum = (items, value) => items.reduce((total, item) => total + (value(item) ?? 0), 0);
const digits = (n) => (n >= 99.95 ? n.toFixed(0) : n >= 9.995 ? n.toFixed(1) : n.toFixed(2));

const scaled = (base, prefixes, unit) => (n) => {
  let power = 0;
  while (Math.abs(n) >= base * 0.9995 && power < prefixes.length - 1)
    [n, power] = [n / base, power + 1];
  return `${power || !Number.isInteger(n) ? digits(n) : n} ${prefixes[power]}${unit}`.trim();
};
const DECIMAL = ["", "k", "M", "G", "T", "P", "E"];
const byteText = scaled(1024, ["", "Ki", "Mi", "Gi", "Ti", "Pi"], "B");
const flopText = scaled(1000, DECIMAL, "FLOP");
const nanosecondText = scaled(1000, ["ns", "µs", "ms", "s"], "");

const figure =
  (text, unit = "") =>
  (n) => {
    if (!isNumber(n)) return el("span.muted", { title: "unknown" }, UNKNOWN);
    const exact = n.toLocaleString("en-US", { maximumFractionDigits: 20 });
    return el("data", { value: n, title: `${exact} ${unit}`.trim() }, text(n));
  };
const bytes = figure(byteText, "bytes");
const flops = figure(flopText, "floating-point operations");
const count = figure(scaled(1000, DECIMAL, ""));
const speed = figure(scaled(1000, DECIMAL, "B/s"), "bytes per second");
const time = figure((seconds) => nanosecondText(seconds * 1e9), "seconds");

// Mesh axes: each has a number, which gives its colour; its name is always shown as well.

const axisNumbers = new Map();
const numberOf = (axis) =>
  axisNumbers.get(axis) ?? axisNumbers.set(axis, axisNumbers.size).size - 1;
const axisStyle = (axis) => ({ "--axis": `var(--axis-${numberOf(axis) % 8})` });
const sortedAxes = (axes) => axes && [...new Set(axes)].sort((a, b) => numberOf(a) - numberOf(b));
const axesText = (axes) => (axes ? axes.join(" + ") || "none" : "no axes fit");

const chip = (axis, size) =>
  el("span.chip", { style: axisStyle(axis) }, size ? `${axis}\u00a0÷${size}` : axis);
const axesNode = (axes) =>
  axes?.length ? axes.map((axis) => [chip(axis), " "]) : el("span.muted", axesText(axes));

/** A bar of pieces [fraction, axes, kind]; each piece shows the colours of its axes as stripes. */
function bar(...pieces) {
  const piece = ([fraction, axes, kind]) => {
    const colours = axes?.map((axis) => el("span", { style: axisStyle(axis) }));
    return el("span.piece", { class: kind, style: { width: `${100 * fraction}%` } }, colours);
  };
  const shown = pieces.filter(([fraction]) => fraction > 0);
  return el("span.bar", { "aria-hidden": "true" }, shown.map(piece));
}

/** A list of labelled bars; an entry is [label, words, number, kind]. */
function bars(entries, show) {
  const most = Math.max(...entries.map(([, , n]) => n ?? 0), Number.MIN_VALUE);
  const entry = ([label, words, n, kind]) => {
    const name = el("dt", label, " ", el("small.muted", words));
    return el("div", name, el("dd", show(n)), el("dd", bar([n / most, null, kind])));
  };
  return el("dl.bars", entries.map(entry));
}
