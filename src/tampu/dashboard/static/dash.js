// Keeps the page current: asks for it again every 2 s and replaces the parts that changed. Works on any page.
"use strict";
(() => {
  const EVERY = 2000, SLOWEST = 30000;
  const button = document.getElementById("live");
  let etag = null, wait = EVERY, timer = 0, busy = false, on = sessionStorage.getItem("live") !== "off";

  const parts = (root) => root.querySelectorAll("[data-live][id]");
  // A part in use stays as it is: a field with the focus, selected text, chosen rows.
  const inUse = (part) => {
    const focus = document.activeElement, marked = document.getSelection();
    return (part.contains(focus) && focus.matches("input:not([type=checkbox]), select, textarea"))
      || (!marked.isCollapsed && part.contains(marked.anchorNode)) || part.querySelector("input:checked") !== null;
  };
  const FOCUSABLE = "a, button, summary, input";
  const renew = (old, fresh) => {
    for (const one of old.querySelectorAll("details[id]")) {
      const twin = fresh.querySelector("#" + CSS.escape(one.id));
      if (twin) twin.open = one.open;
    }
    const place = old.contains(document.activeElement) ? [...old.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement) : -1;
    old.replaceWith(fresh);
    if (place >= 0) fresh.querySelectorAll(FOCUSABLE)[place]?.focus();
  };
  // Rows keep their identity by their id, so that the focus and the pointer stay where they are.
  const swap = (old, fresh) => {
    if (old.isEqualNode(fresh)) return;
    const rows = [...fresh.children], known = new Map([...old.children].map((row) => [row.id, row]));
    if (!rows.length || !rows.every((row) => row.id) || known.has("")) return renew(old, fresh);
    rows.forEach((row, place) => {
      const now = known.get(row.id);
      known.delete(row.id);
      if (now && now.isEqualNode(row)) row = now;
      else if (now) renew(now, row);
      if (old.children[place] !== row) old.insertBefore(row, old.children[place] ?? null);
    });
    for (const gone of known.values()) gone.remove();
  };
  const localise = (root) => {
    for (const time of root.querySelectorAll("time[datetime]")) {
      const at = new Date(time.dateTime);
      if (Number.isNaN(+at)) continue;
      const short = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
      const text = "date" in time.dataset ? at.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" })
        : at.toLocaleTimeString(undefined, time.textContent.length > 5 ? { ...short, second: "2-digit" } : short);
      if (time.textContent !== text) time.textContent = text;
    }
  };
  const show = (state) => {
    if (!button) return;
    const now = document.getElementById("live");
    now.hidden = false;
    now.setAttribute("aria-pressed", String(on));
    now.classList.toggle("lost", state === "lost");
    now.querySelector("span").textContent = state === "lost" ? "Offline" : on ? "Live" : "Paused";
  };
  const refresh = async () => {
    if (!on || document.hidden || busy) return;
    busy = true;
    try {
      const headers = { accept: "text/html" };
      if (etag) headers["if-none-match"] = etag;
      const answer = await fetch(location.href, { headers, cache: "no-store", redirect: "error", signal: AbortSignal.timeout(8000) });
      if (answer.status === 401) location.reload();
      if (answer.ok) {
        etag = answer.headers.get("etag");
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        localise(page);
        for (const old of parts(document)) {
          const fresh = old.id === "status" ? null : page.getElementById(old.id);
          if (fresh && !inUse(old)) swap(old, document.adoptNode(fresh));
        }
      } else if (answer.status !== 304) throw new Error(answer.status);
      wait = EVERY;
      show("live");
    } catch {
      wait = Math.min(wait * 2, SLOWEST);
      show("lost");
    } finally {
      busy = false;
      clearTimeout(timer);
      timer = setTimeout(refresh, wait);
    }
  };
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
  document.addEventListener("click", async (event) => {
    const copy = event.target.closest("[data-copy]");
    if (copy) {
      await navigator.clipboard.writeText(document.getElementById(copy.dataset.copy).textContent);
      copy.textContent = "Copied";
    }
    if (event.target.closest("#live")) {
      on = !on;
      sessionStorage.setItem("live", on ? "on" : "off");
      show();
      refresh();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") { event.preventDefault(); document.querySelector(".find input").focus(); }
    if (event.key === "p") document.getElementById("live").click();
  });
  document.addEventListener("change", (event) => {
    if (event.target.form?.matches("[data-auto]")) event.target.form.requestSubmit();
    if (event.target.id === "every") for (const box of document.querySelectorAll(".pick input")) box.checked = event.target.checked;
  });
  document.addEventListener("pointerover", (event) => {
    const hit = event.target.closest?.(".hit");
    if (hit) hit.closest("figure").querySelector("output").textContent = hit.querySelector("title").textContent;
  });
  for (const copy of document.querySelectorAll("[data-copy]")) copy.hidden = !navigator.clipboard;
  for (const every of document.querySelectorAll(".every")) every.hidden = false;
  for (const one of document.querySelectorAll("nav [aria-current]")) one.scrollIntoView({ inline: "center", block: "nearest" });
  localise(document);
  show("live");
  timer = setTimeout(refresh, EVERY);
})();
