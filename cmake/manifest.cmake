# _lib/manifest.json: what this build contains, for readers that must not load a library to know. It is written when the
# libraries have been built, not before: it says what each was compiled from (digests.cmake), and the libraries of an earlier
# build keep the manifest of that build.
list(JOIN GM_CPU_BUILT "\", \"" _levels)
if(GM_CPU_BUILT)
  set(_levels "\"${_levels}\"")
endif()
set(_left_out "")
if(GM_CUDA_MANIFEST AND GM_LEFT_OUT)
  list(JOIN GM_LEFT_OUT "\", \"" _left_out)
  set(_left_out "\"${_left_out}\"")
endif()
file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/manifest_base.json" CONTENT
"{
  \"version\": \"${PROJECT_VERSION}\",
  \"cpu_levels\": [${_levels}],
  \"cuda\": {${GM_CUDA_MANIFEST}},
  \"hip\": {${GM_HIP_MANIFEST}},
  \"left_out\": [${_left_out}],
  \"compiler\": \"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\",
  \"processor\": \"${CMAKE_SYSTEM_PROCESSOR}\",
  \"torch_target\": \"2.11\"
}
")

# The input of digests.cmake. A build is a code level, an architecture, or the sources that a library is linked with (own_*). Each
# has its sources, their objects in the same order (none for own_*), and flags and compiler as one line.
set(_passed "")
function(gm_pass name)
  list(JOIN ARGN ";" joined)
  set(_passed "${_passed}set(${name} [==[${joined}]==])\n" PARENT_SCOPE)
endfunction()

string(TOUPPER "${CMAKE_BUILD_TYPE}" _type)
set(_cxx "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${_type}} -std=c++${CMAKE_CXX_STANDARD}")
set(_compiler "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
set(_builds "")
set(_watched "")
foreach(level IN LISTS GM_CPU_BUILT)
  gm_pass(GM_SOURCES_${level} "$<TARGET_PROPERTY:gm_cpu_${level},SOURCES>")
  gm_pass(GM_OBJECTS_${level} "$<TARGET_OBJECTS:gm_cpu_${level}>")
  gm_pass(GM_COMPILED_${level} "${_compiler} ${_cxx} $<JOIN:$<TARGET_PROPERTY:gm_cpu_${level},COMPILE_OPTIONS>, >")
  list(APPEND _builds ${level})
endforeach()
gm_pass(GM_SOURCES_own_cpu kernels/_native/threads.cpp)
gm_pass(GM_COMPILED_own_cpu "${_compiler} ${_cxx} $<JOIN:$<TARGET_PROPERTY:gristmill_cpu,COMPILE_OPTIONS>, >")
list(APPEND _builds own_cpu)
list(APPEND _watched ${GM_CPU_SOURCES} kernels/_native/threads.cpp gristmill_cpu)
if(GM_CUDA_MANIFEST)
  gm_pass(GM_SOURCES_sm_90a ${GM_SM90_SOURCES})
  gm_pass(GM_OBJECTS_sm_90a ${GM_SM90_OBJECTS})
  gm_pass(GM_COMPILED_sm_90a "nvcc ${GM_NVCC_BUILD} ${GM_CUBIN_FLAGS} ${_compiler} ${GM_CUDA_HOST_FLAGS}")
  gm_pass(GM_SOURCES_own_cuda kernels/_native/cuda_driver.cpp)
  gm_pass(GM_COMPILED_own_cuda "nvcc ${GM_NVCC_BUILD} ${_compiler} ${GM_CUDA_HOST_FLAGS}")
  list(APPEND _builds sm_90a own_cuda)
  list(APPEND _watched ${GM_SM90_SOURCES} kernels/_native/cuda_driver.cpp gristmill_cuda_sm90a)
  foreach(source IN LISTS GM_SM90_SOURCES GM_PTX_SOURCES_75)  # digests of a generated source cover its template and the table
    get_source_file_property(_origin "${source}" GM_ORIGIN)
    if(_origin)
      gm_pass("GM_ORIGIN_${source}" ${_origin})
      list(APPEND _watched ${_origin})
    endif()
  endforeach()
endif()
foreach(arch IN LISTS GM_PTX_ARCHS)
  if(GM_PTX_SOURCES_${arch})
    gm_pass(GM_SOURCES_compute_${arch} ${GM_PTX_SOURCES_${arch}})
    gm_pass(GM_OBJECTS_compute_${arch} ${GM_PTX_OBJECTS_${arch}})
    gm_pass(GM_COMPILED_compute_${arch} "nvcc ${GM_NVCC_BUILD} ${GM_PTX_FLAGS_${arch}} ${_compiler} ${GM_CUDA_HOST_FLAGS} ${GM_PTX_CUBINS_${arch}}")
    list(APPEND _builds compute_${arch})
    list(APPEND _watched ${GM_PTX_SOURCES_${arch}} gristmill_cuda_compute${arch})
  endif()
endforeach()
if(GM_HIP_ARCHS)
  foreach(arch IN LISTS GM_HIP_ARCHS)
    gm_pass(GM_SOURCES_${arch} ${GM_HIP_SOURCES})
    gm_pass(GM_OBJECTS_${arch} "$<TARGET_OBJECTS:gm_hip>")
    gm_pass(GM_COMPILED_${arch} "clang ${GM_HIP_CLANG_VERSION} ${GM_HIP_FLAGS} ${_compiler} ${_cxx} ${GM_HIP_HOST_FLAGS}")
  endforeach()
  gm_pass(GM_SOURCES_own_hip kernels/_native/hip_driver.cpp)
  gm_pass(GM_COMPILED_own_hip "${_compiler} ${_cxx}")
  list(APPEND _builds ${GM_HIP_ARCHS} own_hip)
  list(APPEND _watched ${GM_HIP_SOURCES} kernels/_native/hip_driver.cpp gristmill_hip)
endif()
gm_pass(GM_BUILDS ${_builds})
gm_pass(GM_ROOT "${CMAKE_SOURCE_DIR}")
gm_pass(GM_BINARY_DIR "${CMAKE_BINARY_DIR}")
gm_pass(GM_NM "${CMAKE_NM}")
gm_pass(GM_BASE "${CMAKE_BINARY_DIR}/manifest_base.json")
gm_pass(GM_MANIFEST "${GM_LIB_DIR}/manifest.json")
file(GENERATE OUTPUT "${CMAKE_BINARY_DIR}/compiled.cmake" CONTENT "${_passed}")

file(GLOB_RECURSE _headers CONFIGURE_DEPENDS RELATIVE "${CMAKE_SOURCE_DIR}" "${CMAKE_SOURCE_DIR}/kernels/*.h" "${CMAKE_SOURCE_DIR}/kernels/*.cuh")
add_custom_command(
  OUTPUT "${GM_LIB_DIR}/manifest.json"
  COMMAND "${CMAKE_COMMAND}" -DGM_COMPILED=${CMAKE_BINARY_DIR}/compiled.cmake -P "${CMAKE_SOURCE_DIR}/cmake/digests.cmake"
  DEPENDS ${_watched} ${_headers} cmake/digests.cmake "${CMAKE_BINARY_DIR}/compiled.cmake" "${CMAKE_BINARY_DIR}/manifest_base.json"
  VERBATIM COMMENT "manifest.json")
add_custom_target(gm_manifest ALL DEPENDS "${GM_LIB_DIR}/manifest.json")
gm_install(FILES "${GM_LIB_DIR}/manifest.json")
