// What all views are made of: elements, tables, and numbers for people.

export const $ = (id) => document.getElementById(id);
export const dark = matchMedia("(prefers-color-scheme: dark)");

const COLOURS = { // told apart by people who see no red or green, too
  light: ["#0b5fc2", "#b35900", "#00734d", "#8f3d8f", "#a3203c", "#5c6670", "#006d80", "#6b5900"],
  dark: ["#6cb0ff", "#ffa657", "#3fd0a0", "#e29be2", "#ff8b93", "#aab4be", "#4fd1e5", "#e3c84f"],
};
export const MOST_RUNS = COLOURS.light.length; // of one view

export const colours = () => COLOURS[dark.matches ? "dark" : "light"];

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// A table that scrolls by itself where it is too wide. A cell is text or an element.
export function table(label, headings, rows) {
  const head = element("tr", {}, ...headings.map((text) => element("th", { scope: "col", textContent: text })));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell))));
  const made = element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
  return element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: label }, made);
}

// Names with values, without those that have none.
export function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== undefined && value !== null && value !== "");
  return element("dl", {}, ...known.flatMap(([name, value]) => [element("dt", { textContent: name }), element("dd", { textContent: value })]));
}

// The address of a run on the page: of its curves, or of another view.
export function linkTo(id, more = {}) {
  return `#${new URLSearchParams([["run", id], ...Object.entries(more)])}`;
}

export function wordsOf(id) {
  return $(id).value.toLowerCase().split(/\s+/).filter(Boolean);
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "";
  const rounded = Number(value.toPrecision(digits));
  return Math.abs(rounded) >= 1e5 ? rounded.toExponential() : String(rounded);
}

// A number with as many digits as tell it from those beside it.
export function told(value, beside = []) {
  let digits = 4;
  for (const other of beside) {
    if (typeof other !== "number" || other === value) continue;
    while (digits < 17 && number(other, digits) === number(value, digits)) digits += 1;
  }
  return number(value, digits);
}

export function duration(seconds) {
  return seconds < 1 && seconds > 0 ? `${Number((seconds * 1000).toPrecision(2))} ms` : seconds < 120 ? `${number(Math.round(seconds * 10) / 10)} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export function bytes(count) {
  return count < 1e6 ? `${Math.round(count / 1e3)} kB` : count < 1e9 ? `${Math.round(count / 1e6)} MB` : `${Math.round(count / 1e8) / 10} GB`;
}

export const moment = (time) => new Date(time).toLocaleString("sv");
