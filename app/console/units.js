// Numbers as people read them.

const WHOLE = new Intl.NumberFormat("en");

export function count(value) {
  return WHOLE.format(value);
}

/** Three digits, as far as they mean anything. */
export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 0.995) return `${ms.toFixed(2)} ms`;
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  if (ms < 59_950) return `${(ms / 1000).toFixed(ms < 9_995 ? 2 : 1)} s`;
  const seconds = Math.round(ms / 1000);
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} m ${seconds % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} m`;
}

/** The same of a round number: without digits that say nothing. */
export function round(ms) {
  return duration(ms).replace(/(\.\d*?)0+ /, (_, kept) => (kept === "." ? " " : `${kept} `));
}

export function ago(seconds) {
  if (seconds < 1) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} m ago`;
  return `${Math.floor(seconds / 3600)} h ago`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value.toFixed(unit === 0 || value >= 99.95 ? 0 : 1)} ${units[unit]}`;
}
