"""The URLs."""

from django.urls import path

from sample_project import views

urlpatterns = [
    path("signups", views.sign_up),
    path("signups/<str:token>", views.signup_status),
]
