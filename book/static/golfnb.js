// What the theme leaves open: the current chapter in sight in the sidebar, and under each result of a search the sentence that was found.
"use strict";

function showChapter() {
  const here = [...document.querySelectorAll("li.current.active > a")].pop(), bar = here && here.closest("dialog, .bd-sidebar-primary");
  if (!bar) return;
  const box = here.getBoundingClientRect(), frame = bar.getBoundingClientRect();
  if (box.top < frame.top + 60 || box.bottom > frame.bottom - 60) bar.scrollTop += box.top - frame.top - bar.clientHeight / 3;
}

function excerpt(text, words) {
  const found = words.map(w => text.toLowerCase().indexOf(w)).filter(i => i >= 0), at = Math.min(...found);
  const begin = at < 90 ? 0 : text.lastIndexOf(" ", at - 80) + 1, end = text.indexOf(" ", begin + 230);
  return (begin ? "… " : "") + text.slice(begin, end < 0 ? undefined : end) + (end < 0 ? "" : " …");
}

function addSnippet(item, words) {
  const link = item.querySelector("a"), [page, anchor] = link.getAttribute("href").split("#");
  const hits = ([, title, text]) => words.filter(w => `${title} ${text}`.toLowerCase().includes(w)).length;
  const parts = (SECTIONS[page] || []).filter(([id]) => !anchor || id === anchor).sort((a, b) => hits(b) - hits(a));
  if (!parts.length || !hits(parts[0])) return;
  const [id, title, text] = parts[0], line = document.createElement("p"), section = document.createElement("a");
  section.href = `${page}#${id}`;
  section.textContent = title;
  line.className = "context";
  line.append(section, " ");
  const pattern = new RegExp(`(${words.map(w => w.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})`, "i");
  for (const piece of excerpt(text, words).split(pattern)) {
    const node = pattern.test(piece) ? document.createElement("mark") : document.createTextNode(piece);
    node.textContent = piece;
    line.append(node);
  }
  item.append(line);
}

function addSnippets(results) {
  const stemmer = new Stemmer(), query = new URLSearchParams(location.search).get("q") || "";
  const words = [...new Set(query.toLowerCase().split(/[^\p{L}\p{N}_]+/u).filter(w => w.length > 1))].map(w => { const s = stemmer.stemWord(w); return w.startsWith(s) ? s : w; });
  const add = () => results.querySelectorAll("ul.search li:not([data-seen])").forEach(item => { item.dataset.seen = ""; addSnippet(item, words); });
  new MutationObserver(add).observe(results, {childList: true, subtree: true});
  add();
}

addEventListener("load", () => {
  showChapter();
  document.querySelectorAll(".primary-toggle").forEach(b => b.addEventListener("click", () => setTimeout(showChapter, 60)));
  const results = document.getElementById("search-results");
  if (!results) return;
  const script = document.createElement("script");
  script.src = "_static/sections.js";
  script.onload = () => addSnippets(results);
  document.head.append(script);
});
