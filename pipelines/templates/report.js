// One section at a time, claims by verdict and words, one source of traces. Without it all is shown.
const root = document.documentElement;
const tabs = [...document.querySelectorAll(".tab")];
const rows = [...document.querySelectorAll("tr[data-status]")];
const search = document.getElementById("search");
const boxes = [...document.querySelectorAll("input[name=status]")];
const traces = document.getElementById("traces");
const words = new Map(rows.map(row =>
  [row, `${row.textContent} ${row.closest(".tab").firstElementChild.textContent}`.toLowerCase()]));
root.classList.add("live");

function open() {
  const wanted = decodeURIComponent(location.hash.slice(1));
  const target = wanted && document.getElementById(wanted);
  const tab = (target && target.closest(".tab")) || tabs[0];
  const figure = target && target.closest("figure.paired");
  if (figure && traces.value !== "both") {
    traces.value = figure.classList.contains("real") ? "real" : "twin";
    root.dataset.traces = traces.value;
  }
  for (const one of tabs) one.classList.toggle("open", one === tab);
  for (const link of document.querySelectorAll("nav a")) link.classList.toggle("on", link.hash === "#" + tab.id);
  // Pictures that load late would push what was asked for out of sight.
  for (const image of tab.querySelectorAll("img")) image.loading = "eager";
  if (target) target.scrollIntoView({behavior: "instant"});
}

function filter() {
  const text = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const kept = new Set(boxes.filter(box => box.checked).map(box => box.value));
  let shown = 0;
  for (const row of rows) {
    const fits = kept.has(row.dataset.status) && text.every(word => words.get(row).includes(word));
    row.classList.toggle("out", !fits);
    shown += fits;
  }
  document.getElementById("shown").value = `${shown} of ${rows.length} claims`;
  if (!search.value) return;
  for (const one of tabs) one.classList.toggle("open", !!one.querySelector("tr[data-status]:not(.out)"));
}

search.addEventListener("input", () => { if (!search.value) open(); filter(); search.scrollIntoView({block: "nearest"}); });
boxes.forEach(box => box.addEventListener("change", filter));
traces.addEventListener("change", () => { root.dataset.traces = traces.value; });
window.addEventListener("load", open);
window.addEventListener("hashchange", () => { search.value = ""; filter(); open(); });
root.dataset.traces = traces.value;
filter();
open();
