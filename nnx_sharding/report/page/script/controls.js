// What the reader can set.

function searchBox(label, onchange) {
  let timer = 0;
  const input = el("input", {
    type: "search",
    placeholder: label,
    "aria-label": label,
    autocomplete: "off",
    spellcheck: "false",
  });
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => onchange(input.value), 120);
  });
  return input;
}

function switchOf(legend, options, chosen, onchange) {
  const name = uniqueId("switch");
  return el(
    "fieldset",
    { class: "switch" },
    el("legend", { class: "hidden" }, legend),
    Object.entries(options).map(([value, text]) => {
      const input = el("input", { type: "radio", name, value, onchange: () => onchange(value) });
      input.checked = value === chosen;
      return el("label", {}, input, el("span", {}, text));
    }),
  );
}

function themeSwitch() {
  const root = document.documentElement;
  const kept = (() => {
    try {
      return localStorage.getItem("nnx_sharding.theme");
    } catch {
      return null; // a sandboxed frame has no storage
    }
  })();
  function set(theme) {
    if (theme === "auto") root.removeAttribute("data-theme");
    else root.setAttribute("data-theme", theme);
    try {
      localStorage.setItem("nnx_sharding.theme", theme);
    } catch {
      return; // then the choice lasts as long as the page
    }
  }
  const start = kept === "light" || kept === "dark" ? kept : "auto";
  if (start !== "auto") set(start);
  return switchOf("Colours", { auto: "Auto", light: "Light", dark: "Dark" }, start, set);
}
