# Compile a CUDA source to a cubin, or a HIP source to a code object, unless the cache has one of the same text, flags and compiler.
#
#   cmake -DGM_NVCC=<nvcc> -DGM_NVCC_BUILD=<its version> "-DGM_FLAGS=<flags>" -DGM_SOURCE=<.cu> -DGM_OUTPUT=<.cubin> -DGM_CACHE=<folder, or off>
#         [-DGM_EMIT=<flags> -DGM_TEXT=<flags> -DGM_TO_GCC=<flag>] -P cached.cmake
#
# GM_EMIT are the flags that compile, without them -cubin; GM_TEXT those that preprocess instead of GM_FLAGS; GM_TO_GCC stands before each flag
# that is for the preprocessor, without it -Xcompiler. One run of the preprocessor writes the depfile and the text, without line numbers: a
# comment, or the folder of a source, changes nothing. Almost all of the build time is compilation: a clean build of a tree that was built
# before takes seconds.
cmake_minimum_required(VERSION 3.20)
include("${CMAKE_CURRENT_LIST_DIR}/kept.cmake")

if(NOT DEFINED GM_EMIT)
  set(GM_EMIT -cubin)
endif()
if(NOT DEFINED GM_TEXT)
  set(GM_TEXT ${GM_FLAGS})
endif()
if(NOT DEFINED GM_TO_GCC)
  set(GM_TO_GCC -Xcompiler)
endif()
set(preprocessed "${GM_OUTPUT}.i")
set(flags "")
foreach(flag IN ITEMS -P -MD -MT "${GM_OUTPUT}" -MF "${GM_OUTPUT}.d")
  list(APPEND flags ${GM_TO_GCC} "${flag}")
endforeach()
gm_run("${GM_NVCC}" ${GM_TEXT} -E ${flags} -o "${preprocessed}" "${GM_SOURCE}")
file(SHA256 "${preprocessed}" sum)
file(REMOVE "${preprocessed}")
set(compile "${GM_NVCC}" ${GM_FLAGS} ${GM_EMIT} -o "${GM_OUTPUT}" "${GM_SOURCE}")
string(TOLOWER "${GM_CACHE}" mode)
if(mode STREQUAL "off")
  gm_run(${compile})
  return()
endif()
string(REGEX REPLACE ";-I;[^;]*|;$" "" flags ";${GM_FLAGS}")
string(SHA256 key "${GM_NVCC_BUILD} ${flags}\n${sum}")
gm_make_or_take("${key}.cubin" ${compile})
