# libgristmill_cuda_<arch>.so: every kernels/**/_*_sm90.cu and the generated sources of linear (frag16_sm90.cmake), compiled by
# nvcc to cubins and embedded beside their host code (kernels/_native/gm_cuda.h). GRISTMILL_CUDA=auto builds it when nvcc is
# there, on requires nvcc, off skips it.
#
# GRISTMILL_RARE=off leaves out what is marked rare, which `make test` does to save compile time: sources whose name ends in
# _rare_sm90.cu or _rare_sm80.cu, weight formats of linear with "rare": true, and every library of PTX but that of compute_80. The
# manifest lists these as left_out, and selection refuses the kernels that run them ("not in this build").
set(_default auto)
if(DEFINED ENV{GRISTMILL_CUDA})
  set(_default "$ENV{GRISTMILL_CUDA}")
endif()
set(GRISTMILL_CUDA "${_default}" CACHE STRING "CUDA part: auto, on or off")
string(TOLOWER "${GRISTMILL_CUDA}" _mode)
if(NOT _mode MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "GRISTMILL_CUDA=${GRISTMILL_CUDA}: expected auto, on or off")
endif()

# Prints the result of the configuration, and writes it to a file for ci/setup.sh.
function(gm_cuda_status text)
  message(STATUS "gristmill CUDA: ${text}")
  file(WRITE "${CMAKE_BINARY_DIR}/gristmill-cuda.txt" "gristmill CUDA: ${text}\n")
endfunction()

set(_rare on)
if(DEFINED ENV{GRISTMILL_RARE})
  set(_rare "$ENV{GRISTMILL_RARE}")
endif()
set(GRISTMILL_RARE "${_rare}" CACHE STRING "instances that are marked rare: on or off")
string(TOLOWER "${GRISTMILL_RARE}" _rare)
if(NOT _rare MATCHES "^(on|off)$")
  message(FATAL_ERROR "GRISTMILL_RARE=${GRISTMILL_RARE}: expected on or off")
endif()

# Takes the sources whose name ends in _rare_sm<NN>.cu out of a list, and notes them as left out.
macro(gm_leave_out_rare list)
  foreach(source IN LISTS ${list})
    if(source MATCHES "_rare_sm[0-9]+\\.cu$")
      list(REMOVE_ITEM ${list} "${source}")
      get_filename_component(stem "${source}" NAME_WE)
      list(APPEND GM_LEFT_OUT ${stem})
    endif()
  endforeach()
endmacro()

# gm_beside(<variable> <source>): the flags by which a generated source includes files beside its template.
function(gm_beside result source)
  set(flags "")
  get_source_file_property(origin "${source}" GM_ORIGIN)
  if(origin)
    list(GET origin 0 origin)
    get_filename_component(origin "${origin}" DIRECTORY)
    set(flags -I "${origin}")
  endif()
  set(${result} "${flags}" PARENT_SCOPE)
endfunction()

set(GM_CUDA_MANIFEST "")
set(GM_LEFT_OUT "")
include(cmake/frag16_sm90.cmake)
file(GLOB_RECURSE GM_SM90_SOURCES CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/kernels/*_sm90.cu")
if(_rare STREQUAL "off")
  gm_leave_out_rare(GM_SM90_SOURCES)
endif()
gm_frag16_sources(_generated ${_rare} GM_LEFT_OUT)
list(APPEND GM_SM90_SOURCES ${_generated})
if(GRISTMILL_SM90_SOURCES)  # for tests of the build itself: only these
  set(GM_SM90_SOURCES ${GRISTMILL_SM90_SOURCES})
endif()

# NVCC is the path of the compiler; NVCC_PREPEND_FLAGS is nvcc's own variable, for example for -ccbin.
find_program(GRISTMILL_NVCC NAMES nvcc HINTS ENV NVCC ENV CUDACXX ENV CUDA_HOME PATH_SUFFIXES bin)
set(_why "")
if(_mode STREQUAL "off")
  set(_why "off, by GRISTMILL_CUDA")
elseif(NOT GRISTMILL_NVCC)
  if(_mode STREQUAL "on")
    message(FATAL_ERROR "GRISTMILL_CUDA=on, but no nvcc was found: put it on PATH, set CUDA_HOME, or use GRISTMILL_CUDA=auto")
  endif()
  set(_why "not built, no nvcc found (GRISTMILL_CUDA=on makes this an error)")
elseif(NOT GM_SM90_SOURCES)
  set(_why "nvcc found, but there are no CUDA sources")
else()
  execute_process(COMMAND "${GRISTMILL_NVCC}" --version OUTPUT_VARIABLE _out RESULT_VARIABLE _rc)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" _match "${_out}")
  set(GM_NVCC_VERSION "${CMAKE_MATCH_1}")
  string(REGEX MATCH "V[0-9.]+" GM_NVCC_BUILD "${_out}")
  if(NOT _rc EQUAL 0 OR GM_NVCC_VERSION VERSION_LESS 12.3)
    if(_mode STREQUAL "on")
      message(FATAL_ERROR "GRISTMILL_CUDA=on, but ${GRISTMILL_NVCC} is release '${GM_NVCC_VERSION}'; sm_90a needs 12.3 or newer")
    endif()
    set(_why "not built, ${GRISTMILL_NVCC} is release '${GM_NVCC_VERSION}' and sm_90a needs 12.3 or newer")
  endif()
endif()

if(_why)
  gm_cuda_status("${_why}")
  file(REMOVE "${GM_LIB_DIR}/libgristmill_cuda_sm90a.so")  # a library of an earlier build must not outlive its manifest entry
  return()
endif()

set(_host_flags -fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-Wall,-Wextra)
set(GRISTMILL_NVCC_FLAGS "" CACHE STRING "further flags of nvcc for the kernels, by semicolons")
set(_include -I "${CMAKE_SOURCE_DIR}/kernels/_native" -I "${CMAKE_SOURCE_DIR}/kernels")
set(GM_CUBIN_FLAGS -std=c++20 -O3 -arch=sm_90a ${GRISTMILL_NVCC_FLAGS})
set(GM_CUDA_HOST_FLAGS -x c++ -std=c++20 -O2 -Xcompiler ${_host_flags})
if(DEFINED ENV{XDG_CACHE_HOME})
  set(_kept "$ENV{XDG_CACHE_HOME}/gristmill/cubins")
else()
  set(_kept "$ENV{HOME}/.cache/gristmill/cubins")
endif()
set(GRISTMILL_CUBIN_CACHE "${_kept}" CACHE STRING "where cubins are kept between builds, or off (cached.cmake)")
set(_dir "${CMAKE_BINARY_DIR}/cuda_sm90a")
file(MAKE_DIRECTORY "${_dir}")
# Cubins are embedded compressed, a tenth of their size. The driver decompresses them; every driver for CUDA 13 (r580)
# can, but not every older one, so output of nvcc 12 is embedded uncompressed.
set(_image cubin)
if(NOT GM_NVCC_VERSION VERSION_LESS 13.0)
  get_filename_component(_bin "${GRISTMILL_NVCC}" DIRECTORY)
  find_program(GRISTMILL_FATBINARY NAMES fatbinary HINTS "${_bin}")
endif()
if(GRISTMILL_FATBINARY)
  set(_image fatbin)
  set(GM_COMPRESS "${CMAKE_COMMAND}" "-DGM_FATBINARY=${GRISTMILL_FATBINARY}" "-DGM_NVCC_BUILD=${GM_NVCC_BUILD}" "-DGM_CACHE=${GRISTMILL_CUBIN_CACHE}")
endif()
# The host halves, by ccache where C++ is (CMakeLists.txt).
set(GM_NVCC_OF_HOST "${GRISTMILL_NVCC}")
if(CMAKE_CXX_COMPILER_LAUNCHER)
  set(GM_NVCC_OF_HOST ${CMAKE_CXX_COMPILER_LAUNCHER} "${GRISTMILL_NVCC}")
endif()
set(_objects "")
set(GM_SM90_OBJECTS "")
foreach(source IN LISTS GM_SM90_SOURCES)
  get_filename_component(stem "${source}" NAME_WE)
  string(MAKE_C_IDENTIFIER "gm_cubin${stem}" symbol)
  gm_beside(_beside "${source}")
  add_custom_command(
    OUTPUT "${_dir}/${stem}.cubin"
    COMMAND "${CMAKE_COMMAND}" "-DGM_NVCC=${GRISTMILL_NVCC}" "-DGM_NVCC_BUILD=${GM_NVCC_BUILD}"
            "-DGM_FLAGS=${GM_CUBIN_FLAGS};${_include};${_beside}" "-DGM_SOURCE=${source}" "-DGM_OUTPUT=${_dir}/${stem}.cubin"
            "-DGM_CACHE=${GRISTMILL_CUBIN_CACHE}" -P "${CMAKE_SOURCE_DIR}/cmake/cached.cmake"
    DEPENDS "${source}" "${CMAKE_SOURCE_DIR}/cmake/cached.cmake" DEPFILE "${_dir}/${stem}.cubin.d" VERBATIM COMMENT "nvcc sm_90a ${stem}.cu")
  # The host half, compiled as plain C++ (nvcc only adds the path of cuda.h), and the cubin as data.
  add_custom_command(
    OUTPUT "${_dir}/${stem}.o"
    COMMAND ${GM_NVCC_OF_HOST} ${GM_CUDA_HOST_FLAGS} ${_include} ${_beside} -DGM_CUBIN_SYMBOL=${symbol}
            -MD -MF "${_dir}/${stem}.o.d" -c -o "${_dir}/${stem}.o" "${source}"
    DEPENDS "${source}" DEPFILE "${_dir}/${stem}.o.d" VERBATIM COMMENT "host half of ${stem}.cu")
  if(GRISTMILL_FATBINARY)
    add_custom_command(
      OUTPUT "${_dir}/${stem}.fatbin"
      COMMAND ${GM_COMPRESS} "-DGM_IMAGES=kind=elf,sm=90a,file=${_dir}/${stem}.cubin" "-DGM_OUTPUT=${_dir}/${stem}.fatbin"
              -P "${CMAKE_SOURCE_DIR}/cmake/compressed.cmake"
      DEPENDS "${_dir}/${stem}.cubin" "${CMAKE_SOURCE_DIR}/cmake/compressed.cmake" VERBATIM COMMENT "compressing ${stem}.cubin")
  endif()
  file(CONFIGURE OUTPUT "${_dir}/${stem}_cubin.cpp" CONTENT
"__asm__(\".pushsection .rodata\\n.balign 64\\n.globl ${symbol}\\n.hidden ${symbol}\\n${symbol}:\\n.incbin \\\"${_dir}/${stem}.${_image}\\\"\\n.popsection\\n\");
")
  set_source_files_properties("${_dir}/${stem}_cubin.cpp" PROPERTIES OBJECT_DEPENDS "${_dir}/${stem}.${_image}")
  list(APPEND _objects "${_dir}/${stem}.o" "${_dir}/${stem}_cubin.cpp")
  list(APPEND GM_SM90_OBJECTS "${_dir}/${stem}.o")
endforeach()
set(_driver "${CMAKE_SOURCE_DIR}/kernels/_native/cuda_driver.cpp")
add_custom_command(
  OUTPUT "${_dir}/cuda_driver.o"
  COMMAND ${GM_NVCC_OF_HOST} ${GM_CUDA_HOST_FLAGS} ${_include} -DGM_CUBIN_SYMBOL=gm_no_cubin
          -MD -MF "${_dir}/cuda_driver.o.d" -c -o "${_dir}/cuda_driver.o" "${_driver}"
  DEPENDS "${_driver}" DEPFILE "${_dir}/cuda_driver.o.d" VERBATIM COMMENT "cuda_driver.cpp")
add_custom_target(gm_cuda_driver DEPENDS "${_dir}/cuda_driver.o")  # which every library of CUDA has

add_library(gristmill_cuda_sm90a SHARED ${_objects} "${_dir}/cuda_driver.o")
set_source_files_properties(${_objects} "${_dir}/cuda_driver.o" PROPERTIES GENERATED TRUE)
add_dependencies(gristmill_cuda_sm90a gm_cuda_driver)
target_link_libraries(gristmill_cuda_sm90a PRIVATE ${CMAKE_DL_LIBS})
target_link_options(gristmill_cuda_sm90a PRIVATE -Wl,-z,defs -Wl,--as-needed -s)
set_target_properties(gristmill_cuda_sm90a PROPERTIES PREFIX lib SUFFIX .so LINKER_LANGUAGE CXX
                      LIBRARY_OUTPUT_DIRECTORY "${GM_LIB_DIR}" SKIP_BUILD_RPATH ON INSTALL_RPATH "")
gm_install(TARGETS gristmill_cuda_sm90a LIBRARY)
set(GM_CUDA_MANIFEST "\"sm_90a\": {\"file\": \"libgristmill_cuda_sm90a.so\", \"nvcc\": \"${GM_NVCC_VERSION}\"}")
list(LENGTH GM_SM90_SOURCES _count)
list(LENGTH GM_LEFT_OUT _absent)
set(_without "")
if(_absent)
  set(_without ", without ${_absent} rare source(s) (GRISTMILL_RARE=${GRISTMILL_RARE})")
endif()
gm_cuda_status("sm_90a by nvcc ${GM_NVCC_VERSION}, ${_count} source(s)${_without}")
