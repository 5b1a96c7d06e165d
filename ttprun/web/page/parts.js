// Small things that all parts use: elements made from words, numbers as people write them.

const byId = (id) => document.getElementById(id);

/** Make an element. `attributes`: strings; `on...` are listeners; "text" is its text. Never markup from data. */
function make(tag, attributes = {}, ...children) {
  const isDrawn = ["svg", "g", "path", "rect", "line", "text", "title", "circle"].includes(tag);
  const element = isDrawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "words") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Put new text into an element, if it differs: what has not changed must not be read out again. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const unixOf = (at) => Date.parse(at) / 1000;

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0005) return "0 s";
  if (value < 10) return `${value.toFixed(value < 1 ? 3 : 2)} s`;
  if (value < 120) return `${value.toFixed(0)} s`;
  const hours = Math.floor(value / 3600), minutes = Math.floor((value % 3600) / 60);
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${Math.floor(value % 60)} s`;
}

function figure(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(3);
}

function bytes(value) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < 4) { value /= 1000; unit += 1; }
  return `${unit ? value.toPrecision(3) : value} ${units[unit]}`;
}

const clock = (unix) => new Date(unix * 1000).toISOString().slice(11, 19);

/** A reason, and where its kind is explained. */
function withKind(kind, words) {
  return kind ? `${words} (ttprun explain ${kind})` : words;
}
