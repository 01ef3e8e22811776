// Elements of the page. Text stays text: nothing in the console parses HTML, and its policy forbids it.

/** An element with attributes, listeners (`onclick`) and children (elements or text). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

/** What is already said is not said again: a selection in it stays. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function show(element, shown) {
  element.hidden = !shown;
}

/** One child of `parent` per item, in order. A child whose key is known stays, with its focus; `create` makes a
 * new one, `update` brings either up to date. */
export function keep(parent, items, keyOf, create, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    const child = known.get(key) ?? create(item);
    known.delete(key);
    child.dataset.key = key;
    update(child, item);
    if (child === next) next = child.nextElementSibling;
    else parent.insertBefore(child, next);
  }
  for (const child of known.values()) child.remove();
}
