# Libraries of PTX: libgristmill_cuda_compute<arch>.so has every kernels/**/_*_sm<arch>.cu, compiled by nvcc to PTX of compute_<arch>, which the
# driver compiles for any GPU from sm_<arch> on, and embedded beside its host code like the cubins of cuda.cmake, whose compiler, modes and flags
# it shares; that of compute_75 has the sources of frag16_sm75.cmake as well. GRISTMILL_RARE=off builds compute_80 alone; the manifest lists the others as left_out.
#
# compute_120f is the family of sm_120: its PTX has block-scaled mma.sync, and runs on sm_120 and sm_121 alone. To test its sources on other GPUs,
# GRISTMILL_SM120f_AS=90 compiles them for those, with GRISTMILL_NVCC_FLAGS=-DGM_BLOCK_SCALE_BY_BF16.
#
# GRISTMILL_CUBINS: architectures by semicolons, 80;86;89;100;120 for example, for which each library embeds cubins as well (wheels), if its PTX
# is not newer; that of a family only its own, 120f. There the driver has nothing to compile, and a driver older than the compiler's PTX can
# load them.
set(GM_PTX_ARCHS 75 80 89 120f)
if(GM_NVCC_VERSION VERSION_LESS 12.9)  # knows no families
  list(REMOVE_ITEM GM_PTX_ARCHS 120f)
endif()
include(cmake/frag16_sm75.cmake)
set(_cubins "")
if(DEFINED ENV{GRISTMILL_CUBINS})
  set(_cubins "$ENV{GRISTMILL_CUBINS}")
endif()
set(GRISTMILL_CUBINS "${_cubins}" CACHE STRING "architectures that get cubins besides PTX, by semicolons: 80;86;89")

# gm_ptx_library(arch sources...): the library of these sources. Sets GM_PTX_OBJECTS_<arch>, the host halves in the order of the sources,
# GM_PTX_FLAGS_<arch>, by which they are compiled, and GM_PTX_CUBINS_<arch>.
function(gm_ptx_library arch)
  set(library gristmill_cuda_compute${arch})
  set(_as ${arch})
  if(GRISTMILL_SM${arch}_AS)
    set(_as ${GRISTMILL_SM${arch}_AS})
  endif()
  set(flags -std=c++20 -O3 -arch=compute_${_as} ${GRISTMILL_NVCC_FLAGS})
  set(_dir "${CMAKE_BINARY_DIR}/cuda_compute${arch}")
  file(MAKE_DIRECTORY "${_dir}")
  set(_cubins ${GRISTMILL_CUBINS})
  foreach(one IN LISTS GRISTMILL_CUBINS)
    string(REGEX MATCH "^[0-9]+" _one "${one}")
    string(REGEX MATCH "^[0-9]+" _oldest "${arch}")
    if(_one LESS _oldest OR (arch MATCHES "[af]$" AND NOT one STREQUAL arch))
      list(REMOVE_ITEM _cubins ${one})
    endif()
  endforeach()
  set(_linked "")
  set(_objects "")
  foreach(source IN LISTS ARGN)
    get_filename_component(stem "${source}" NAME_WE)
    string(MAKE_C_IDENTIFIER "gm_cubin${stem}" symbol)
    gm_beside(_beside "${source}")
    set(_includes ${_include} ${_beside})
    add_custom_command(
      OUTPUT "${_dir}/${stem}.ptx"
      COMMAND "${CMAKE_COMMAND}" "-DGM_NVCC=${GRISTMILL_NVCC}" "-DGM_NVCC_BUILD=${GM_NVCC_BUILD}" -DGM_EMIT=-ptx
              "-DGM_FLAGS=${flags};${_includes}" "-DGM_SOURCE=${source}" "-DGM_OUTPUT=${_dir}/${stem}.ptx"
              "-DGM_CACHE=${GRISTMILL_CUBIN_CACHE}" -P "${CMAKE_SOURCE_DIR}/cmake/cached.cmake"
      DEPENDS "${source}" "${CMAKE_SOURCE_DIR}/cmake/cached.cmake" DEPFILE "${_dir}/${stem}.ptx.d" VERBATIM COMMENT "nvcc compute_${arch} ${stem}.cu")
    set(_images "kind=ptx,sm=${_as},file=${_dir}/${stem}.ptx")
    set(_made "${_dir}/${stem}.ptx")
    foreach(one IN LISTS _cubins)
      set(_cubin "${_dir}/${stem}.sm${one}.cubin")
      add_custom_command(
        OUTPUT "${_cubin}"
        COMMAND "${CMAKE_COMMAND}" "-DGM_NVCC=${GRISTMILL_NVCC}" "-DGM_NVCC_BUILD=${GM_NVCC_BUILD}"
                "-DGM_FLAGS=-std=c++20;-O3;-arch=sm_${one};${GRISTMILL_NVCC_FLAGS};${_includes}" "-DGM_SOURCE=${source}" "-DGM_OUTPUT=${_cubin}"
                "-DGM_CACHE=${GRISTMILL_CUBIN_CACHE}" -P "${CMAKE_SOURCE_DIR}/cmake/cached.cmake"
        DEPENDS "${source}" "${CMAKE_SOURCE_DIR}/cmake/cached.cmake" DEPFILE "${_cubin}.d" VERBATIM COMMENT "nvcc sm_${one} ${stem}.cu")
      list(APPEND _images "kind=elf,sm=${one},file=${_cubin}")
      list(APPEND _made "${_cubin}")
    endforeach()
    add_custom_command(
      OUTPUT "${_dir}/${stem}.o"
      COMMAND ${GM_NVCC_OF_HOST} ${GM_CUDA_HOST_FLAGS} ${_includes} -DGM_CUBIN_SYMBOL=${symbol}
              -MD -MF "${_dir}/${stem}.o.d" -c -o "${_dir}/${stem}.o" "${source}"
      DEPENDS "${source}" DEPFILE "${_dir}/${stem}.o.d" VERBATIM COMMENT "host half of ${stem}.cu")
    # Without the fatbinary of nvcc 13 (cuda.cmake), the PTX itself, as a string that ends with a zero.
    set(_data "${_dir}/${stem}.ptx")
    if(GRISTMILL_FATBINARY)
      set(_data "${_dir}/${stem}.fatbin")
      add_custom_command(
        OUTPUT "${_data}"
        COMMAND ${GM_COMPRESS} "-DGM_IMAGES=${_images}" "-DGM_OUTPUT=${_data}" -P "${CMAKE_SOURCE_DIR}/cmake/compressed.cmake"
        DEPENDS ${_made} "${CMAKE_SOURCE_DIR}/cmake/compressed.cmake" VERBATIM COMMENT "compressing ${stem}")
    endif()
    file(CONFIGURE OUTPUT "${_dir}/${stem}_image.cpp" CONTENT
"__asm__(\".pushsection .rodata\\n.balign 64\\n.globl ${symbol}\\n.hidden ${symbol}\\n${symbol}:\\n.incbin \\\"${_data}\\\"\\n.byte 0\\n.popsection\\n\");
")
    set_source_files_properties("${_dir}/${stem}_image.cpp" PROPERTIES OBJECT_DEPENDS "${_data}")
    list(APPEND _linked "${_dir}/${stem}.o" "${_dir}/${stem}_image.cpp")
    list(APPEND _objects "${_dir}/${stem}.o")
  endforeach()

  add_library(${library} SHARED ${_linked} "${CMAKE_BINARY_DIR}/cuda_sm90a/cuda_driver.o")
  set_source_files_properties(${_linked} "${CMAKE_BINARY_DIR}/cuda_sm90a/cuda_driver.o" PROPERTIES GENERATED TRUE)
  add_dependencies(${library} gm_cuda_driver)
  target_link_libraries(${library} PRIVATE ${CMAKE_DL_LIBS})
  target_link_options(${library} PRIVATE -Wl,-z,defs -Wl,--as-needed -s)
  set_target_properties(${library} PROPERTIES PREFIX lib SUFFIX .so LINKER_LANGUAGE CXX
                        LIBRARY_OUTPUT_DIRECTORY "${GM_LIB_DIR}" SKIP_BUILD_RPATH ON INSTALL_RPATH "")
  gm_install(TARGETS ${library} LIBRARY)
  set(GM_CUDA_MANIFEST "${GM_CUDA_MANIFEST}, \"compute_${arch}\": {\"file\": \"lib${library}.so\", \"nvcc\": \"${GM_NVCC_VERSION}\"}" PARENT_SCOPE)
  set(GM_PTX_OBJECTS_${arch} ${_objects} PARENT_SCOPE)
  set(GM_PTX_FLAGS_${arch} ${flags} PARENT_SCOPE)
  set(GM_PTX_CUBINS_${arch} ${_cubins} PARENT_SCOPE)
  list(LENGTH ARGN _count)
  message(STATUS "gristmill PTX: compute_${arch}, ${_count} source(s), cubins: ${_cubins}")
endfunction()

# For tests of the build itself: GRISTMILL_SM<arch>_SOURCES, and then no others.
set(_chosen "${GRISTMILL_SM90_SOURCES}")
foreach(arch IN LISTS GM_PTX_ARCHS)
  list(APPEND _chosen ${GRISTMILL_SM${arch}_SOURCES})
endforeach()
foreach(arch IN LISTS GM_PTX_ARCHS)
  file(GLOB_RECURSE GM_PTX_SOURCES_${arch} CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/kernels/*_sm${arch}.cu")
  if(arch STREQUAL 75)
    gm_frag16_sm75_sources(_generated)
    list(PREPEND GM_PTX_SOURCES_75 ${_generated})  # in the order of names, as tests/kernels/machine_code.py takes them
  endif()
  if(_rare STREQUAL "off" AND arch STREQUAL 80)
    gm_leave_out_rare(GM_PTX_SOURCES_${arch})
  elseif(_rare STREQUAL "off")
    list(APPEND GM_LEFT_OUT compute_${arch})
    set(GM_PTX_SOURCES_${arch} "")
  endif()
  if(_chosen)
    set(GM_PTX_SOURCES_${arch} ${GRISTMILL_SM${arch}_SOURCES})
  endif()
  if(GM_CUDA_MANIFEST AND GM_PTX_SOURCES_${arch})
    gm_ptx_library(${arch} ${GM_PTX_SOURCES_${arch}})
  else()
    set(GM_PTX_SOURCES_${arch} "")
    file(REMOVE "${GM_LIB_DIR}/libgristmill_cuda_compute${arch}.so")  # a library of an earlier build must not outlive its manifest entry
  endif()
endforeach()
