/* Numbers as people read them. Pure. */

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function whole(value) {
  return grouped.format(value);
}

const compacted = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

/* 950, 12.3K, 4.5M */
function compact(value) {
  return compacted.format(value);
}

/* Three figures: 0.123, 1.23, 12.3, 123. */
function short(value) {
  if (value === 0) return "0";
  if (value >= 1000) return whole(value);
  return value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2);
}

function percent(share) {
  const value = 100 * share;
  if (value > 0 && value < 0.1) return "< 0.1%";
  return value.toFixed(value < 10 ? 1 : 0) + "%";
}

function bytes(value) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit + 1 < units.length) {
    value /= 1024;
    unit++;
  }
  return (unit === 0 ? whole(value) : short(value)) + " " + units[unit];
}

function seconds(value) {
  if (value === Infinity) return "more";
  if (value === 0) return "0";
  if (value < 0.001) return trim(value * 1e6) + " µs";
  if (value < 1) return trim(value * 1e3) + " ms";
  if (value < 120) return trim(value) + " s";
  if (value < 7200) return whole(value / 60) + " min";
  return value < 172800 ? whole(value / 3600) + " h" : whole(value / 86400) + " days";
}

/* At most three figures, without zeros behind the point. */
function trim(value) {
  return String(Number(value.toPrecision(3)));
}

function plural(n, one, many) {
  return whole(n) + " " + (n === 1 ? one : many);
}
