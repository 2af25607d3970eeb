# libgristmill_cpu.so: every _*_cpu.cpp under kernels/ and quant/, compiled once per ISA level with -DGM_LEVEL=<level>.
include(CheckCXXCompilerFlag)
option(GRISTMILL_SANITIZE "Build the CPU kernels and tests/native/*_asan.cpp with AddressSanitizer and UBSan" OFF)
option(GRISTMILL_CPU_HIGHEST "Build each kernel only for the highest level that it has" OFF)

# gm_level(name flags...) offers a level; it is built if the compiler takes every flag.
set(GM_CPU_LEVELS "")
function(gm_level name)
  string(REPLACE ";" " " joined "${ARGN}")
  set(CMAKE_REQUIRED_FLAGS "${joined}")
  check_cxx_compiler_flag("${joined}" GM_HAVE_${name})
  if(GM_HAVE_${name})
    set(GM_CPU_LEVELS ${GM_CPU_LEVELS} ${name} PARENT_SCOPE)
    set(GM_FLAGS_${name} ${ARGN} PARENT_SCOPE)
  endif()
endfunction()

set(_processor "${CMAKE_SYSTEM_PROCESSOR}")
if(_processor MATCHES "^(x86_64|AMD64|amd64)$")
  set(_v2 -march=x86-64-v2)
  set(_avx2 ${_v2} -mavx2 -mfma -mf16c -mbmi -mbmi2)
  set(_avx512 ${_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512)
  gm_level(base ${_v2})
  gm_level(avx2 ${_avx2})
  gm_level(avx512 ${_avx512})
  gm_level(avx512_vnni ${_avx512} -mavx512vnni)
  gm_level(avx512_bf16 ${_avx512} -mavx512vnni -mavx512bf16)
  gm_level(amx ${_avx512} -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8)
elseif(_processor MATCHES "^(aarch64|arm64)$")
  gm_level(neon -march=armv8-a)
  gm_level(neon_dotprod -march=armv8.2-a+fp16+dotprod)
  gm_level(neon_i8mm -march=armv8.2-a+fp16+dotprod+i8mm)
  gm_level(sve -march=armv8.2-a+fp16+dotprod+i8mm+sve)
else()
  gm_level(base -O3)
endif()
if(GRISTMILL_CPU_LEVELS)  # these levels only
  set(_offered ${GM_CPU_LEVELS})
  list(FILTER GM_CPU_LEVELS INCLUDE REGEX "^(${GRISTMILL_CPU_LEVELS})$")
  if(NOT GM_CPU_LEVELS)
    message(FATAL_ERROR "GRISTMILL_CPU_LEVELS=${GRISTMILL_CPU_LEVELS} matches no level; the compiler offers ${_offered}")
  endif()
endif()

set(GM_CXX_FLAGS -Wall -Wextra -Wno-psabi -Wno-maybe-uninitialized -fno-exceptions -fno-rtti -ffp-contract=off -fno-math-errno
    -fno-trapping-math
    $<$<AND:$<CONFIG:Release>,$<NOT:$<BOOL:${GRISTMILL_SANITIZE}>>>:-O3>)
if(GRISTMILL_SANITIZE)  # unoptimized: with -O1 sanitized code compiles for twice as long and runs no faster
  list(APPEND GM_CXX_FLAGS -g1 -O0 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all)
endif()

file(GLOB_RECURSE GM_CPU_SOURCES CONFIGURE_DEPENDS RELATIVE "${CMAKE_SOURCE_DIR}" "${CMAKE_SOURCE_DIR}/kernels/*_cpu.cpp"
     "${CMAKE_SOURCE_DIR}/quant/*_cpu.cpp")
list(FILTER GM_CPU_SOURCES INCLUDE REGEX "/_[^/]*_cpu\\.cpp$")
if(GRISTMILL_CPU_SOURCES)  # for tests of the build itself: only these
  set(GM_CPU_SOURCES ${GRISTMILL_CPU_SOURCES})
endif()

# A source may name its levels in a comment: "// gm-levels: base avx2 avx512". amx is built only for those that name it.
foreach(source IN LISTS GM_CPU_SOURCES)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
  file(STRINGS "${source}" _line REGEX "^// gm-levels:" LIMIT_COUNT 1)
  string(REGEX MATCHALL "[a-z0-9_]+" _levels "${_line}")
  set(_last "")
  foreach(level IN LISTS GM_CPU_LEVELS)
    if((_line STREQUAL "" AND NOT level STREQUAL "amx") OR level IN_LIST _levels)
      if(_last AND GRISTMILL_CPU_HIGHEST)
        list(REMOVE_ITEM GM_CPU_SOURCES_${_last} "${source}")
      endif()
      list(APPEND GM_CPU_SOURCES_${level} "${source}")
      set(_last ${level})
    endif()
  endforeach()
endforeach()

foreach(level IN LISTS GM_CPU_LEVELS)
  if(GM_CPU_SOURCES_${level})
    add_library(gm_cpu_${level} OBJECT ${GM_CPU_SOURCES_${level}})
    target_include_directories(gm_cpu_${level} PRIVATE kernels/_native kernels)
    target_compile_definitions(gm_cpu_${level} PRIVATE GM_LEVEL=${level})
    target_compile_options(gm_cpu_${level} PRIVATE ${GM_CXX_FLAGS} ${GM_FLAGS_${level}})
    list(APPEND GM_CPU_OBJECTS $<TARGET_OBJECTS:gm_cpu_${level}>)
    list(APPEND GM_CPU_BUILT ${level})
  endif()
endforeach()

list(JOIN GM_CPU_BUILT " " _joined)
message(STATUS "gristmill CPU: levels ${_joined}")
if(GRISTMILL_SANITIZE)
  return()
endif()

# torch's thread pool is the one thing taken from torch (see kernels/_native/torch_stub.cpp for why a stub is linked).
add_library(gm_torch_stub SHARED kernels/_native/torch_stub.cpp)
set_target_properties(gm_torch_stub PROPERTIES OUTPUT_NAME torch_cpu LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/stub")

add_library(gristmill_cpu SHARED kernels/_native/threads.cpp kernels/_native/call_list.cpp ${GM_CPU_OBJECTS})
target_include_directories(gristmill_cpu PRIVATE kernels/_native kernels)
target_compile_options(gristmill_cpu PRIVATE ${GM_CXX_FLAGS})
target_link_libraries(gristmill_cpu PRIVATE gm_torch_stub)
target_link_options(gristmill_cpu PRIVATE -Wl,-z,defs -Wl,--as-needed $<$<CONFIG:Release>:-s>)
set_target_properties(gristmill_cpu PROPERTIES PREFIX lib SUFFIX .so LIBRARY_OUTPUT_DIRECTORY "${GM_LIB_DIR}"
                      SKIP_BUILD_RPATH ON INSTALL_RPATH "")
gm_install(TARGETS gristmill_cpu LIBRARY)
