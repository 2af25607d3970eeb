# tests/native/<op>_asan.cpp: a program per kernel, linked with the sanitized kernels of every level and a serial thread stub.
file(GLOB GM_ASAN_SOURCES CONFIGURE_DEPENDS tests/native/*_asan.cpp)
foreach(source IN LISTS GM_ASAN_SOURCES)
  get_filename_component(name "${source}" NAME_WE)
  add_executable(${name} "${source}" tests/native/serial_threads.cpp ${GM_CPU_OBJECTS})
  target_include_directories(${name} PRIVATE "${CMAKE_SOURCE_DIR}" tests/native kernels/_native)
  target_compile_options(${name} PRIVATE -g1 -O0 -fno-omit-frame-pointer -fsanitize=address,undefined)
  target_link_options(${name} PRIVATE -fsanitize=address,undefined)
endforeach()
