// Making nodes. Text from a report only ever becomes the text of a node: nothing parses it as HTML.

const CHUNK = 200; // rows or lines that are shown at first

const isSet = (value) => value !== null && value !== undefined && value !== false;

/** An element, as `el("p.muted", { title: "…" }, "text", node)`; attributes may be left out. */
function el(tag, ...children) {
  const [name, ...classes] = tag.split(".");
  const attributes = children[0]?.constructor === Object ? children.shift() : {};
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

/** Shows the first items in a container; `more` is a button that doubles their number. */
function growing(container, make) {
  let [items, count] = [[], 0];
  const more = el("button.more", { onclick: () => add(count) });
  function add(some) {
    container.append(...items.slice(count, count + some).map(make));
    count = Math.min(items.length, count + some);
    more.hidden = count === items.length;
    more.textContent = `Show more (${integer(items.length - count)} left)`;
  }
  function show(all, keepCount = false) {
    const some = keepCount ? Math.max(CHUNK, count) : CHUNK;
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

function choiceOf(label, names, chosen, onchoice) {
  const onchange = () => onchoice(choice.value);
  const options = names.map((name) => el("option", { selected: name === chosen }, name));
  const choice = el("select", { "aria-label": label, onchange }, options);
  return choice;
}
