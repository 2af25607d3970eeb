# Put the images of a source into a fatbin, compressed, unless the cache has one of the same images by the same tool.
#
#   cmake -DGM_FATBINARY=<fatbinary> -DGM_NVCC_BUILD=<its version> "-DGM_IMAGES=kind=ptx,sm=80,file=<.ptx>;..." -DGM_OUTPUT=<.fatbin>
#         -DGM_CACHE=<folder, or off> -P compressed.cmake
cmake_minimum_required(VERSION 3.20)
include("${CMAKE_CURRENT_LIST_DIR}/kept.cmake")

set(command "${GM_FATBINARY}" --64 "--create=${GM_OUTPUT}" --compress-all --compress-mode=size)
set(words "${GM_NVCC_BUILD} compressed by size")
foreach(image IN LISTS GM_IMAGES)
  list(APPEND command "--image3=${image}")
  string(REGEX REPLACE "^.*,file=" "" file "${image}")
  string(REGEX REPLACE ",file=.*$" "" kind "${image}")
  file(SHA256 "${file}" sum)
  string(APPEND words "\n${kind} ${sum}")
endforeach()
string(TOLOWER "${GM_CACHE}" mode)
if(mode STREQUAL "off")
  gm_run(${command})
  return()
endif()
string(SHA256 key "${words}")
gm_make_or_take("${key}.fatbin" ${command})
