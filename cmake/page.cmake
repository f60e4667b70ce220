# The page of `apa report` as C: cmake -DPAGE=cli/page -DVENDOR=cli/vendor/chartjs -DOUT=page_html.c -P cmake/page.cmake
#
# page.html has marks @NAME@ for style, library, its licence and scripts; the mark @APA_DATA@ stays for the command to fill
# in. The result is an array of bytes: a string literal has a length that every compiler takes of 4095 only.
function(insert mark file)
  file(READ ${file} text)
  if(mark STREQUAL "LIBRARY") # the page has no other file, so no source map either
    string(REGEX REPLACE "\n//# sourceMappingURL=[^\n]*" "" text "${text}")
  endif()
  string(REPLACE "@${mark}@" "${text}" page "${page}")
  set(page "${page}" PARENT_SCOPE)
endfunction()

file(READ ${PAGE}/page.html page)
insert(STYLE ${PAGE}/page.css)
insert(LICENCE ${VENDOR}/LICENSE)
insert(LIBRARY ${VENDOR}/chart.umd.js)
foreach(name BASE MAP MAP_VIEW CHARTS TABLES MAIN)
  string(TOLOWER ${name} lower)
  insert(${name} ${PAGE}/${lower}.js)
endforeach()

file(WRITE ${OUT}.html "${page}")
file(READ ${OUT}.html bytes HEX)
string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
file(WRITE ${OUT} "/* Made by cmake/page.cmake. */
#include \"page.h\"

const unsigned char cli_page_html[] = {
${bytes}
};
const size_t cli_page_size = sizeof cli_page_html;
")
