// Small makers of elements. Text is only ever set as text: what workers and models say is never HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((each) => each !== null));
  return element;
}

export function html(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

export function byId(id) {
  return document.getElementById(id);
}

export function number(value, digits = 0) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Milliseconds, with as many digits as say something. */
export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${number(value / 1000, 1)} s`;
  return `${number(value, value < 10 ? 2 : value < 100 ? 1 : 0)} ms`;
}

export function bytes(value) {
  if (!value) return "–";
  return value >= 1e9 ? `${number(value / 1e9, 2)} GB` : `${number(value / 1e6, 1)} MB`;
}
