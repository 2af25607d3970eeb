# _lib/manifest.json: what this build contains, for readers that must not load a library to know.
list(JOIN GM_CPU_BUILT "\", \"" _levels)
if(GM_CPU_BUILT)
  set(_levels "\"${_levels}\"")
endif()
file(CONFIGURE OUTPUT "${GM_LIB_DIR}/manifest.json" CONTENT
"{
  \"version\": \"${PROJECT_VERSION}\",
  \"cpu_levels\": [${_levels}],
  \"cuda\": {${GM_CUDA_MANIFEST}},
  \"compiler\": \"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\",
  \"processor\": \"${CMAKE_SYSTEM_PROCESSOR}\",
  \"torch_target\": \"2.11\"
}
")
gm_install(FILES "${GM_LIB_DIR}/manifest.json")
