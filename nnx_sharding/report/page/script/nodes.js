// Making nodes. Text from a report only ever becomes the text of a node: nothing parses it as HTML.

const CHUNK = 200; // rows or lines that are shown at first

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

let ids = 0;
const uniqueId = (name) => `${name}-${++ids}`;

/** Adds the nodes of the first items to a container, and a button that doubles their number. */
function grow(container, items, make, { wrap = (button) => button, atLeast = 0 } = {}) {
  let shown = 0;
  const button = el("button", { class: "more", type: "button", onclick: () => add(shown) });
  const end = wrap(button);
  function add(some) {
    const nodes = items.slice(shown, shown + some).map(make);
    shown = Math.min(items.length, shown + some);
    end.remove();
    container.append(...nodes);
    if (shown === items.length) return;
    button.textContent = `Show more (${integer(items.length - shown)} left)`;
    container.append(end);
  }
  container.replaceChildren();
  add(Math.max(CHUNK, atLeast));
  return () => shown;
}
