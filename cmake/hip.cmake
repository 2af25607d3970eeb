# libgristmill_hip.so: every kernels/**/_*.hip, compiled by plain clang to a code object per AMD target, without ROCm, and embedded
# beside its host code (kernels/_native/gm_hip.h). GRISTMILL_HIP=auto builds it when a clang that compiles for all targets is there
# (Debian: clang-22 and lld-22; 19 lacks gfx950), on requires it, off skips it.
set(_default auto)
if(DEFINED ENV{GRISTMILL_HIP})
  set(_default "$ENV{GRISTMILL_HIP}")
endif()
set(GRISTMILL_HIP "${_default}" CACHE STRING "HIP part: auto, on or off")
string(TOLOWER "${GRISTMILL_HIP}" _mode)
if(NOT _mode MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "GRISTMILL_HIP=${GRISTMILL_HIP}: expected auto, on or off")
endif()

# Target, lanes of a wave, and whether it has v_dot2 of bf16.
set(GM_HIP_TARGETS gfx90a:64:0 gfx942:64:0 gfx950:64:1 gfx1100:32:1 gfx1101:32:1 gfx1102:32:1 gfx1150:32:1 gfx1151:32:1
    gfx1200:32:1 gfx1201:32:1)
set(GM_HIP_MANIFEST "")
set(GM_HIP_ARCHS "")
file(GLOB_RECURSE GM_HIP_SOURCES CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/kernels/_*.hip")

# CLANG_HIP is the path of the compiler.
find_program(GRISTMILL_HIP_CLANG NAMES clang++-23 clang-23 clang++-22 clang-22 clang++-21 clang-21 clang++ clang HINTS ENV CLANG_HIP)
set(_why "")
if(_mode STREQUAL "off")
  set(_why "off, by GRISTMILL_HIP")
elseif(NOT GRISTMILL_HIP_CLANG)
  set(_why "not built, no clang found")
else()
  # The newest target, down to a linked code object: an older clang does not know it, one without lld cannot link.
  file(WRITE "${CMAKE_BINARY_DIR}/hip_probe.hip" "__attribute__((global)) void gm_probe(int* p) { *p = 1; }\n")
  execute_process(
    COMMAND "${GRISTMILL_HIP_CLANG}" -x hip --offload-arch=gfx950 --offload-device-only --no-gpu-bundle-output -nogpulib -nogpuinc
            "${CMAKE_BINARY_DIR}/hip_probe.hip" -o "${CMAKE_BINARY_DIR}/hip_probe.hsaco"
    RESULT_VARIABLE _rc ERROR_VARIABLE _err OUTPUT_QUIET)
  if(NOT _rc EQUAL 0)
    string(REGEX REPLACE "[\r\n].*" "" _err "${_err}")
    set(_why "not built, ${GRISTMILL_HIP_CLANG} does not compile and link for gfx950 (${_err})")
  endif()
endif()
if(_why)
  if(_mode STREQUAL "on")
    message(FATAL_ERROR "GRISTMILL_HIP=on, but: ${_why}; install clang 20 or newer with its AMDGPU target, and lld")
  endif()
  message(STATUS "gristmill HIP: ${_why}")
  file(REMOVE "${GM_LIB_DIR}/libgristmill_hip.so")  # a library of an earlier build must not outlive its manifest entry
  return()
endif()

execute_process(COMMAND "${GRISTMILL_HIP_CLANG}" --version OUTPUT_VARIABLE _out)
string(REGEX MATCH "version ([0-9.]+)" _match "${_out}")
set(GM_HIP_CLANG_VERSION "${CMAKE_MATCH_1}")
# Without the vectorizer of straight-line code, which keeps twice as many values in registers and spills.
set(GM_HIP_FLAGS -std=c++20 -O3 -fno-slp-vectorize -ffp-contract=off -nogpulib -nogpuinc)
set(GM_HIP_HOST_FLAGS -x c++ -fno-exceptions -fno-rtti -Wall -Wextra)
set(_include "${CMAKE_SOURCE_DIR}/kernels/_native")
set(_dir "${CMAKE_BINARY_DIR}/hip")
file(MAKE_DIRECTORY "${_dir}")
if(DEFINED ENV{XDG_CACHE_HOME})
  set(_kept "$ENV{XDG_CACHE_HOME}/gristmill/cubins")
else()
  set(_kept "$ENV{HOME}/.cache/gristmill/cubins")
endif()
if(GRISTMILL_CUBIN_CACHE)  # cuda.cmake has set it where it builds its part
  set(_kept "${GRISTMILL_CUBIN_CACHE}")
endif()
set(_tables "")
foreach(source IN LISTS GM_HIP_SOURCES)
  get_filename_component(stem "${source}" NAME_WE)
  string(MAKE_C_IDENTIFIER "gm_images${stem}" symbol)
  set(_data "")
  set(_rows "")
  set(_images "")
  foreach(row IN LISTS GM_HIP_TARGETS)
    string(REPLACE ":" ";" row "${row}")
    list(GET row 0 arch)
    list(GET row 1 lanes)
    list(GET row 2 dot2)
    set(image "${_dir}/${stem}.${arch}.hsaco")
    set(_flags -x hip --offload-arch=${arch} --offload-device-only ${GM_HIP_FLAGS} -DGM_LANES=${lanes} -DGM_DOT2_BF16=${dot2} -I "${_include}")
    add_custom_command(
      OUTPUT "${image}"
      COMMAND "${CMAKE_COMMAND}" "-DGM_NVCC=${GRISTMILL_HIP_CLANG}" "-DGM_NVCC_BUILD=clang ${GM_HIP_CLANG_VERSION}" "-DGM_FLAGS=${_flags}"
              "-DGM_SOURCE=${source}" "-DGM_OUTPUT=${image}"
              "-DGM_CACHE=${_kept}" -DGM_EMIT=--no-gpu-bundle-output "-DGM_TEXT=-x;c++;-D__HIP__;-I;${_include}"
              -DGM_TO_GCC= -P "${CMAKE_SOURCE_DIR}/cmake/cached.cmake"
      DEPENDS "${source}" "${CMAKE_SOURCE_DIR}/cmake/cached.cmake" DEPFILE "${image}.d" VERBATIM COMMENT "clang ${arch} ${stem}.hip")
    string(APPEND _data "__asm__(\".pushsection .rodata\\n.balign 4096\\n${symbol}_${arch}:\\n.incbin \\\"${image}\\\"\\n.popsection\\n\");\n"
           "extern \"C\" const unsigned char ${symbol}_${arch}[];\n")
    string(APPEND _rows "  {\"${arch}\", ${symbol}_${arch}},\n")
    list(APPEND _images "${image}")
  endforeach()
  file(CONFIGURE OUTPUT "${_dir}/${stem}_images.cpp" CONTENT
"#define GM_HIP_IMAGES ${symbol}
#include \"gm_hip.h\"
${_data}
const gm::HipImage ${symbol}[] = {
${_rows}  {nullptr, nullptr}};
")
  set_source_files_properties("${_dir}/${stem}_images.cpp" PROPERTIES OBJECT_DEPENDS "${_images}")
  list(APPEND _tables "${_dir}/${stem}_images.cpp")
  set_source_files_properties("${source}" PROPERTIES LANGUAGE CXX COMPILE_DEFINITIONS "GM_HIP_IMAGES=${symbol}")
endforeach()
foreach(row IN LISTS GM_HIP_TARGETS)
  string(REGEX REPLACE ":.*" "" arch "${row}")
  list(APPEND GM_HIP_ARCHS ${arch})
endforeach()

add_library(gm_hip OBJECT ${GM_HIP_SOURCES})
target_compile_options(gm_hip PRIVATE ${GM_HIP_HOST_FLAGS})
target_include_directories(gm_hip PRIVATE "${_include}")
add_library(gristmill_hip SHARED $<TARGET_OBJECTS:gm_hip> ${_tables} "${_include}/hip_driver.cpp")
target_compile_options(gristmill_hip PRIVATE -fno-exceptions -fno-rtti -Wall -Wextra)
target_include_directories(gristmill_hip PRIVATE "${_include}")
target_link_libraries(gristmill_hip PRIVATE ${CMAKE_DL_LIBS})
target_link_options(gristmill_hip PRIVATE -Wl,-z,defs -Wl,--as-needed -s)
set_target_properties(gristmill_hip PROPERTIES PREFIX lib SUFFIX .so LIBRARY_OUTPUT_DIRECTORY "${GM_LIB_DIR}" SKIP_BUILD_RPATH ON INSTALL_RPATH "")
gm_install(TARGETS gristmill_hip LIBRARY)
list(TRANSFORM GM_HIP_ARCHS REPLACE "(.+)" "\"\\1\": {\"file\": \"libgristmill_hip.so\", \"clang\": \"${GM_HIP_CLANG_VERSION}\"}"
     OUTPUT_VARIABLE _entries)
list(JOIN _entries ", " GM_HIP_MANIFEST)
list(LENGTH GM_HIP_ARCHS _count)
message(STATUS "gristmill HIP: ${_count} targets by clang ${GM_HIP_CLANG_VERSION}")
