# Compile a CUDA source to a cubin, or a HIP source to a code object, unless the cache has one of the same text, flags and compiler.
#
#   cmake -DGM_NVCC=<nvcc> -DGM_NVCC_BUILD=<its version> "-DGM_FLAGS=<flags>" -DGM_SOURCE=<.cu> -DGM_OUTPUT=<.cubin> -DGM_CACHE=<folder, or off>
#         [-DGM_EMIT=<flags> -DGM_LIST=<flags> -DGM_TEXT=<flags>] -P cached.cmake
#
# GM_EMIT are the flags that compile rather than list, without them -cubin; GM_LIST the flags that list the files (-M, which becomes the
# depfile) and preprocess instead of GM_FLAGS; GM_TEXT those that preprocess without line numbers. The text is the preprocessed one: a comment,
# or the folder of a source, changes nothing. Cubins that no build has used for 60 days are removed. Almost all of the build time is
# compilation: a clean build of a tree that was built before takes seconds.
cmake_minimum_required(VERSION 3.20)

function(gm_run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    file(REMOVE "${GM_OUTPUT}")
    message(FATAL_ERROR "${GM_SOURCE}: ${ARGV0} ended with ${status}")
  endif()
endfunction()

if(NOT DEFINED GM_EMIT)
  set(GM_EMIT -cubin)
endif()
if(NOT DEFINED GM_LIST)
  set(GM_LIST ${GM_FLAGS})
endif()
if(NOT DEFINED GM_TEXT)
  set(GM_TEXT -Xcompiler -P)
endif()
gm_run("${GM_NVCC}" ${GM_LIST} -M -MT "${GM_OUTPUT}" -MF "${GM_OUTPUT}.d" "${GM_SOURCE}")
set(compile "${GM_NVCC}" ${GM_FLAGS} ${GM_EMIT} -o "${GM_OUTPUT}" "${GM_SOURCE}")
string(TOLOWER "${GM_CACHE}" mode)
if(mode STREQUAL "off")
  gm_run(${compile})
  return()
endif()

set(preprocessed "${GM_OUTPUT}.i")
gm_run("${GM_NVCC}" ${GM_LIST} -E ${GM_TEXT} -o "${preprocessed}" "${GM_SOURCE}")
file(SHA256 "${preprocessed}" sum)
file(REMOVE "${preprocessed}")
string(REGEX REPLACE ";-I;[^;]*|;$" "" flags ";${GM_FLAGS}")
string(SHA256 key "${GM_NVCC_BUILD} ${flags}\n${sum}")
set(cached "${GM_CACHE}/${key}.cubin")

if(EXISTS "${cached}")
  gm_run("${CMAKE_COMMAND}" -E copy "${cached}" "${GM_OUTPUT}")
  file(TOUCH "${cached}")
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
# Written to a temporary file and renamed, so that another build never reads a partial file. A read-only cache costs time only.
string(RANDOM LENGTH 12 part)
execute_process(COMMAND "${CMAKE_COMMAND}" -E make_directory "${GM_CACHE}" OUTPUT_QUIET ERROR_QUIET)
execute_process(COMMAND "${CMAKE_COMMAND}" -E copy "${GM_OUTPUT}" "${cached}.${part}" RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
if(status EQUAL 0)
  execute_process(COMMAND "${CMAKE_COMMAND}" -E rename "${cached}.${part}" "${cached}" OUTPUT_QUIET ERROR_QUIET)
else()
  message(STATUS "${GM_CACHE} cannot be written: ${GM_SOURCE} will be compiled again by the next build")
endif()
