# Compile a CUDA source to a cubin, unless a cubin of the same text, flags and compiler is kept from an earlier build.
#
#   cmake -DGM_NVCC=<nvcc> -DGM_NVCC_BUILD=<its version> "-DGM_FLAGS=<flags>" -DGM_SOURCE=<.cu> -DGM_OUTPUT=<.cubin>
#         "-DGM_ROOTS=<folders that may lie elsewhere in the next build>" -DGM_CACHE=<folder, or off> -P cached.cmake
#
# The text is every file that nvcc reads, by its own list (-M), which becomes the depfile too. Kept cubins that no
# build asked for in 60 days are removed. Compiling is all but the whole of a build's time: a clean build of a tree
# that was built before takes seconds.
cmake_minimum_required(VERSION 3.20)

function(gm_run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    file(REMOVE "${GM_OUTPUT}")
    message(FATAL_ERROR "${GM_SOURCE}: ${ARGV0} ended with ${status}")
  endif()
endfunction()

gm_run("${GM_NVCC}" ${GM_FLAGS} -M -MT "${GM_OUTPUT}" -MF "${GM_OUTPUT}.d" "${GM_SOURCE}")
set(compile "${GM_NVCC}" ${GM_FLAGS} -cubin -o "${GM_OUTPUT}" "${GM_SOURCE}")
string(TOLOWER "${GM_CACHE}" mode)
if(mode STREQUAL "off")
  gm_run(${compile})
  return()
endif()

file(READ "${GM_OUTPUT}.d" read)
string(REGEX REPLACE "^[^:]*:" "" read "${read}")
string(REGEX REPLACE "[ \t\r\n\\]+" ";" read "${read}")
list(REMOVE_ITEM read "")
set(text "${GM_NVCC_BUILD} ${GM_FLAGS}")
foreach(file IN LISTS read)
  file(SHA256 "${file}" sum)
  string(APPEND text "\n${sum} ${file}")
endforeach()
foreach(root IN LISTS GM_ROOTS)
  string(REPLACE "${root}/" "" text "${text}")
endforeach()
string(SHA256 key "${text}")
set(kept "${GM_CACHE}/${key}.cubin")

if(EXISTS "${kept}")
  gm_run("${CMAKE_COMMAND}" -E copy "${kept}" "${GM_OUTPUT}")
  file(TOUCH "${kept}")
  return()
endif()

gm_run(${compile})
string(TIMESTAMP now "%s" UTC)
file(GLOB others "${GM_CACHE}/*.cubin")
foreach(other IN LISTS others)
  file(TIMESTAMP "${other}" used "%s" UTC)
  if(used AND now GREATER used)
    math(EXPR age "(${now} - ${used}) / 86400")
    if(age GREATER 60)
      file(REMOVE "${other}")
    endif()
  endif()
endforeach()
# Written beside and renamed, so that another build never reads half a file. A cache that cannot be written costs time only.
string(RANDOM LENGTH 12 part)
execute_process(COMMAND "${CMAKE_COMMAND}" -E make_directory "${GM_CACHE}" OUTPUT_QUIET ERROR_QUIET)
execute_process(COMMAND "${CMAKE_COMMAND}" -E copy "${GM_OUTPUT}" "${kept}.${part}" RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
if(status EQUAL 0)
  execute_process(COMMAND "${CMAKE_COMMAND}" -E rename "${kept}.${part}" "${kept}" OUTPUT_QUIET ERROR_QUIET)
else()
  message(STATUS "${GM_CACHE} cannot be written: ${GM_SOURCE} is compiled anew by the next build")
endif()
