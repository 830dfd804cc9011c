// Tables with many rows are sorted, filtered and paged; without JavaScript all rows are there.
document.querySelectorAll('table[data-key]').forEach(function (table) {
  var body = table.tBodies[0], size = +table.dataset.rows || Infinity, first = 0, wanted = '';
  var rows = Array.prototype.slice.call(body.rows), order = rows.slice();
  if (rows.length < 4) { return; }
  var tools = document.createElement('p'), where = document.createElement('span');
  var matching = function () {
    return order.filter(function (row) { return row.textContent.toLowerCase().includes(wanted); });
  };
  var show = function (at) {
    var found = matching(), last = Math.max(0, Math.floor((found.length - 1) / size) * size || 0);
    first = Math.max(0, Math.min(at, last));
    rows.forEach(function (row) { row.hidden = true; });
    found.slice(first, first + size).forEach(function (row) { row.hidden = false; });
    where.textContent = ' rows ' + Math.min(first + 1, found.length) + ' to ' +
      Math.min(first + size, found.length) + ' of ' + found.length + ' ';
  };
  var button = function (name, at) {
    var b = document.createElement('button');
    b.type = 'button'; b.textContent = name; b.onclick = function () { show(at()); };
    tools.appendChild(b);
  };
  var value = function (row, index) {
    var text = row.cells[index].textContent, number = parseFloat(text);
    return isNaN(number) ? text : number;
  };
  var compare = function (a, b) {
    if (typeof a !== typeof b) { return typeof a === 'number' ? -1 : 1; }  // text after numbers
    return typeof a === 'number' ? a - b : a.localeCompare(b);
  };
  Array.prototype.forEach.call(table.tHead.rows[0].cells, function (head, index) {
    head.tabIndex = 0; head.title = 'Sort by ' + head.textContent;
    head.onclick = function () {
      var down = head.getAttribute('aria-sort') === 'ascending';
      table.querySelectorAll('th').forEach(function (th) { th.removeAttribute('aria-sort'); });
      head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
      order.sort(function (a, b) {
        return compare(value(a, index), value(b, index)) * (down ? -1 : 1);
      });
      order.forEach(function (row) { body.appendChild(row); });
      show(0);
    };
    head.onkeydown = function (event) { if (event.key === 'Enter') { head.onclick(); } };
  });
  if (table.dataset.key === 'ranking' || table.dataset.key === 'others') {
    var field = document.createElement('input');
    field.type = 'search'; field.placeholder = 'Filter rows, e.g. zero2';
    field.setAttribute('aria-label', 'Filter rows');
    field.oninput = function () { wanted = field.value.toLowerCase(); show(0); };
    tools.appendChild(field);
  }
  if (rows.length > size) {
    button('First', function () { return 0; });
    button('Back', function () { return first - size; });
    tools.appendChild(where);
    button('Next', function () { return first + size; });
    button('Last', function () { return rows.length; });
  }
  tools.className = 'tools';
  if (tools.childNodes.length) { table.parentNode.parentNode.insertBefore(tools, table.parentNode); }
  if (rows.length > size) { show(0); }
  window.addEventListener('beforeprint', function () { tools.hidden = true; });
});
document.querySelectorAll('.command button').forEach(function (b) {
  b.hidden = false;
  b.onclick = function () {
    var pre = b.parentNode.querySelector('pre');
    var done = function () {
      b.textContent = 'Copied'; setTimeout(function () { b.textContent = 'Copy'; }, 1200);
    };
    var pick = function () {
      var range = document.createRange(), chosen = window.getSelection();
      range.selectNodeContents(pre); chosen.removeAllRanges(); chosen.addRange(range);
      if (document.execCommand('copy')) { done(); }
    };
    if (navigator.clipboard) { navigator.clipboard.writeText(pre.textContent).then(done, pick); }
    else { pick(); }
  };
});
