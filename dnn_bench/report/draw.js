"use strict";
// Small helpers: elements, scales, axes. Everything on the page is made with these.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function shape(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const ms = (seconds) => (seconds === null || seconds === undefined ? "" : (seconds * 1e3).toFixed(seconds && Math.abs(seconds) < 0.01 ? 2 : 0));
const fixed = (value, digits) => (value === null || value === undefined ? "" : value.toFixed(digits));
const percent = (value) => (value === null || value === undefined ? "" : `${(value * 100).toFixed(0)} %`);

// A function from [low, high] to [from, to] that knows its domain.
function scale(low, high, from, to) {
  const map = (value) => from + ((value - low) / (high - low || 1)) * (to - from);
  map.low = low;
  map.high = high;
  map.invert = (position) => low + ((position - from) / (to - from)) * (high - low);
  return map;
}

// Round values inside [low, high], about `count` of them.
function ticks(low, high, count = 6) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) values.push(value);
  return values;
}

function bottomAxis(x, y, top, label) {
  const group = shape("g");
  for (const value of ticks(x.low, x.high)) {
    group.append(
      shape("line", { class: "axis", x1: x(value), x2: x(value), y1: top, y2: y }),
      shape("text", { class: "soft", x: x(value), y: y + 14, "text-anchor": "middle" }, label(value)),
    );
  }
  return group;
}

function legend(entries) {
  const dot = (name) => element("i", { style: `background: var(--${name})` });
  return element("p", { class: "legend" }, ...entries.map(([name, text]) => element("span", {}, dot(name), text)));
}
