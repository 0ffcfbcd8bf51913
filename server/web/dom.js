/* Making and changing elements. Text is only ever set as text. */

function byId(id) {
  return document.getElementById(id);
}

function make(tag, attributes, ...children) {
  const svg = ["svg", "rect", "path", "polyline", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/* Touches the document only if something differs, so that a reader's place in it stays. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/* A figure that is a series of /metrics: it says which, and what it was read as. */
function setFigure(element, series, value, text) {
  if (series) {
    element.dataset.series = series;
    element.dataset.value = String(value);
  }
  setText(element, text);
}

/* Children of `parent`, one per item and kept by key: `build(item)` makes one, `fill(child, item)`
 * brings it up to date. */
function sync(parent, items, keyOf, build, fill) {
  const kept = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, i) => {
    const key = String(keyOf(item));
    const child = kept.get(key) || build(item);
    child.dataset.key = key;
    kept.delete(key);
    if (parent.children[i] !== child) parent.insertBefore(child, parent.children[i] || null);
    fill(child, item);
  });
  for (const child of kept.values()) child.remove();
}

/* A table row of `n` cells, the first of which heads it. */
function makeRow(n) {
  const row = make("tr");
  row.append(make("th", { scope: "row" }));
  for (let i = 1; i < n; i++) row.append(make("td"));
  return row;
}
