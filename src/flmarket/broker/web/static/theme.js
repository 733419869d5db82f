/* Runs before the first paint, so that a chosen colour scheme does not flash. */
(function () {
  "use strict";
  try {
    var chosen = localStorage.getItem("flmarket-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch { /* storage may be forbidden: the system's scheme applies */ }
  document.documentElement.classList.add("js");
})();
