# libgristmill_cuda_compute80.so: every kernels/**/_*_sm80.cu, compiled by nvcc to PTX of compute_80, which the driver compiles for any GPU
# from sm_80 on, and embedded beside its host code like the cubins of cuda.cmake, whose compiler, modes and flags it shares.
#
# GRISTMILL_CUBINS: architectures by semicolons, 80;86;89;100;120 for example, for which cubins are embedded as well (wheels). There the
# driver has nothing to compile, and a driver older than the compiler's PTX can load them.
set(_cubins "")
if(DEFINED ENV{GRISTMILL_CUBINS})
  set(_cubins "$ENV{GRISTMILL_CUBINS}")
endif()
set(GRISTMILL_CUBINS "${_cubins}" CACHE STRING "architectures that get cubins besides PTX, by semicolons: 80;86;89")
file(GLOB_RECURSE GM_SM80_SOURCES CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/kernels/*_sm80.cu")
if(_rare STREQUAL "off")
  gm_leave_out_rare(GM_SM80_SOURCES)
endif()
if(GRISTMILL_SM90_SOURCES OR GRISTMILL_SM80_SOURCES)  # for tests of the build itself: only these
  set(GM_SM80_SOURCES ${GRISTMILL_SM80_SOURCES})
endif()
if(NOT GM_CUDA_MANIFEST OR NOT GM_SM80_SOURCES)
  set(GM_SM80_SOURCES "")
  file(REMOVE "${GM_LIB_DIR}/libgristmill_cuda_compute80.so")  # a library of an earlier build must not outlive its manifest entry
  return()
endif()

set(GM_PTX_FLAGS -std=c++20 -O3 -arch=compute_80 ${GRISTMILL_NVCC_FLAGS})
set(_dir "${CMAKE_BINARY_DIR}/cuda_compute80")
file(MAKE_DIRECTORY "${_dir}")
set(_objects "")
set(GM_SM80_OBJECTS "")
foreach(source IN LISTS GM_SM80_SOURCES)
  get_filename_component(stem "${source}" NAME_WE)
  string(MAKE_C_IDENTIFIER "gm_cubin${stem}" symbol)
  add_custom_command(
    OUTPUT "${_dir}/${stem}.ptx"
    COMMAND "${CMAKE_COMMAND}" "-DGM_NVCC=${GRISTMILL_NVCC}" "-DGM_NVCC_BUILD=${GM_NVCC_BUILD}" -DGM_EMIT=-ptx
            "-DGM_FLAGS=${GM_PTX_FLAGS};${_include}" "-DGM_SOURCE=${source}" "-DGM_OUTPUT=${_dir}/${stem}.ptx"
            "-DGM_CACHE=${GRISTMILL_CUBIN_CACHE}" -P "${CMAKE_SOURCE_DIR}/cmake/cached.cmake"
    DEPENDS "${source}" "${CMAKE_SOURCE_DIR}/cmake/cached.cmake" DEPFILE "${_dir}/${stem}.ptx.d" VERBATIM COMMENT "nvcc compute_80 ${stem}.cu")
  set(_images "--image3=kind=ptx,sm=80,file=${_dir}/${stem}.ptx")
  set(_made "${_dir}/${stem}.ptx")
  foreach(arch IN LISTS GRISTMILL_CUBINS)
    set(_cubin "${_dir}/${stem}.sm${arch}.cubin")
    add_custom_command(
      OUTPUT "${_cubin}"
      COMMAND "${CMAKE_COMMAND}" "-DGM_NVCC=${GRISTMILL_NVCC}" "-DGM_NVCC_BUILD=${GM_NVCC_BUILD}"
              "-DGM_FLAGS=-std=c++20;-O3;-arch=sm_${arch};${GRISTMILL_NVCC_FLAGS};${_include}" "-DGM_SOURCE=${source}" "-DGM_OUTPUT=${_cubin}"
              "-DGM_CACHE=${GRISTMILL_CUBIN_CACHE}" -P "${CMAKE_SOURCE_DIR}/cmake/cached.cmake"
      DEPENDS "${source}" "${CMAKE_SOURCE_DIR}/cmake/cached.cmake" DEPFILE "${_cubin}.d" VERBATIM COMMENT "nvcc sm_${arch} ${stem}.cu")
    list(APPEND _images "--image3=kind=elf,sm=${arch},file=${_cubin}")
    list(APPEND _made "${_cubin}")
  endforeach()
  add_custom_command(
    OUTPUT "${_dir}/${stem}.o"
    COMMAND "${GRISTMILL_NVCC}" ${GM_CUDA_HOST_FLAGS} ${_include} -DGM_CUBIN_SYMBOL=${symbol}
            -MD -MF "${_dir}/${stem}.o.d" -c -o "${_dir}/${stem}.o" "${source}"
    DEPENDS "${source}" DEPFILE "${_dir}/${stem}.o.d" VERBATIM COMMENT "host half of ${stem}.cu")
  # Without the fatbinary of nvcc 13 (cuda.cmake), the PTX itself, as a string that ends with a zero.
  set(_data "${_dir}/${stem}.ptx")
  if(GRISTMILL_FATBINARY)
    set(_data "${_dir}/${stem}.fatbin")
    add_custom_command(
      OUTPUT "${_data}"
      COMMAND "${GRISTMILL_FATBINARY}" --64 "--create=${_data}" ${_images} --compress-all --compress-mode=size
      DEPENDS ${_made} VERBATIM COMMENT "compressing ${stem}")
  endif()
  file(CONFIGURE OUTPUT "${_dir}/${stem}_image.cpp" CONTENT
"__asm__(\".pushsection .rodata\\n.balign 64\\n.globl ${symbol}\\n.hidden ${symbol}\\n${symbol}:\\n.incbin \\\"${_data}\\\"\\n.byte 0\\n.popsection\\n\");
")
  set_source_files_properties("${_dir}/${stem}_image.cpp" PROPERTIES OBJECT_DEPENDS "${_data}")
  list(APPEND _objects "${_dir}/${stem}.o" "${_dir}/${stem}_image.cpp")
  list(APPEND GM_SM80_OBJECTS "${_dir}/${stem}.o")
endforeach()

add_library(gristmill_cuda_compute80 SHARED ${_objects} "${CMAKE_BINARY_DIR}/cuda_sm90a/cuda_driver.o")
set_source_files_properties(${_objects} PROPERTIES GENERATED TRUE)
add_dependencies(gristmill_cuda_compute80 gristmill_cuda_sm90a)  # which makes cuda_driver.o
target_link_libraries(gristmill_cuda_compute80 PRIVATE ${CMAKE_DL_LIBS})
target_link_options(gristmill_cuda_compute80 PRIVATE -Wl,-z,defs -Wl,--as-needed -s)
set_target_properties(gristmill_cuda_compute80 PROPERTIES PREFIX lib SUFFIX .so LINKER_LANGUAGE CXX
                      LIBRARY_OUTPUT_DIRECTORY "${GM_LIB_DIR}" SKIP_BUILD_RPATH ON INSTALL_RPATH "")
gm_install(TARGETS gristmill_cuda_compute80 LIBRARY)
string(APPEND GM_CUDA_MANIFEST ", \"compute_80\": {\"file\": \"libgristmill_cuda_compute80.so\", \"nvcc\": \"${GM_NVCC_VERSION}\"}")
list(LENGTH GM_SM80_SOURCES _count)
message(STATUS "gristmill PTX: compute_80, ${_count} source(s), cubins: ${GRISTMILL_CUBINS}")
